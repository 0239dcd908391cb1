// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func bench(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	var o, e strings.Builder
	code = run(append([]string{"bench"}, args...), streams{strings.NewReader(""), &o, &e})
	return code, o.String(), e.String()
}

func TestBenchMeasuresAServer(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	dir := t.TempDir()
	page, picture := filepath.Join(dir, "r.html"), filepath.Join(dir, "r.png")
	code, out, errs := bench(t, "--url", e.URL(), "--clients", "2", "--requests", "6", "--max-tokens", "4",
		"--prompt-tokens", "20", "--slo-ttft", "1m", "--slo-itl", "1m", "--html", page, "--png", picture)
	require.Equal(t, exitOK, code, "%s%s", out, errs)
	assert.Regexp(t, `served +6\n`, out)
	assert.Regexp(t, `failed +0\n`, out)
	assert.Contains(t, out, "goodput")
	assert.Empty(t, errs, "no bar where nobody looks at a terminal")
	html, err := os.ReadFile(page)
	require.NoError(t, err)
	assert.Contains(t, string(html), "<h1>pdctl bench</h1>")
	assert.NotContains(t, string(html), `src="http`, "the page needs no other file")
	f, err := os.Open(picture)
	require.NoError(t, err)
	defer f.Close()
	drawn, err := png.Decode(f)
	require.NoError(t, err)
	assert.Greater(t, drawn.Bounds().Dx(), 500)

	e.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Count: -1})
	code, out, _ = bench(t, "--url", e.URL(), "--model", "tiny", "--clients", "1", "--requests", "2", "--json")
	assert.Equal(t, exitFaults, code)
	assert.True(t, json.Valid([]byte(out)), out)
	assert.Contains(t, out, "500")
}

func TestBenchRefusesWhatItCannotMeasure(t *testing.T) {
	escapes := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"data":[{"id":"a\u001b[2J"}]}`))
	}))
	defer escapes.Close()
	for args, want := range map[string]string{
		"--clients 1":                                        "--url",
		"--url nonsense --clients 1":                         "--url is no URL",
		"--url http://127.0.0.1:1":                           "--rate for an open loop",
		"--url http://127.0.0.1:1 --rate 1 --clients 1":      "--rate for an open loop",
		"--url http://127.0.0.1:1 --rate NaN":                "--rate is a number",
		"--url http://127.0.0.1:1 --rate +Inf":               "--rate is a number",
		"--url http://127.0.0.1:1 --rate=-1":                 "negative",
		"--url http://127.0.0.1:1 --clients 1 --rounds 0":    "at least 1",
		"--url http://127.0.0.1:1 --clients 1":               "does not answer",
		"--url http://127.0.0.1:1 --clients 1 --prompts /no": "prompts",
		"--url " + escapes.URL + " --clients 1":              "control characters",
	} {
		code, out, errs := bench(t, strings.Fields(args)...)
		assert.Equal(t, exitUsage, code, args)
		assert.Empty(t, out, args)
		assert.Contains(t, errs, want, args)
	}
}
