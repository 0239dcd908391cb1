// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

func verify(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	var o, e strings.Builder
	code = run(append([]string{"verify"}, args...), streams{strings.NewReader(""), &o, &e})
	return code, o.String(), e.String()
}

func simulated(t *testing.T, prefill, decode enginesim.Config) (p, d *enginesim.Engine) {
	t.Helper()
	p, d, err := enginesim.Pair(prefill, decode)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	return p, d
}

func TestVerifyEndsWithTheJudgement(t *testing.T) {
	p, d := simulated(t, enginesim.Config{}, enginesim.Config{})
	code, out, errs := verify(t, "--connector", "NixlConnector", "--prefill", p.URL(), "--decode", d.URL(), "--model",
		"tiny")
	assert.Equal(t, exitOK, code, "%s%s", out, errs)
	assert.Contains(t, out, "nixl: reused, ")
	assert.Contains(t, out, "texts equal to one engine alone: 3 of 3")

	code, out, _ = verify(t, "--connector", "http", "--prefill", p.URL(), "--decode", d.URL(), "--model", "tiny",
		"--probes", "1")
	assert.Equal(t, exitFaults, code)
	assert.Contains(t, out, "http: not reused, 0 of ")
	assert.Contains(t, out, "name the protocol that the engines speak")
}

func TestVerifyWritesJSON(t *testing.T) {
	p, d := simulated(t, enginesim.Config{}, enginesim.Config{})
	code, out, errs := verify(t, "--connector", "http", "--prefill", p.URL(), "--decode", d.URL(), "--model", "tiny",
		"--probes", "1", "--json")
	assert.Equal(t, exitFaults, code, errs)
	var r reuse.Report
	require.NoError(t, json.Unmarshal([]byte(out), &r), out)
	assert.Equal(t, reuse.NotReused, r.Verdict)
	assert.Zero(t, r.Reused)
	require.Len(t, r.Probes, 1)
	assert.Positive(t, r.Probes[0].PromptTokens)
	require.NotEmpty(t, r.Reasons)
	assert.Contains(t, out, `"remedy": "name the protocol`)
	assert.NotContains(t, out, "keys and values of this prompt", "no prompt")
}

func TestVerifyReadsAModelServersFile(t *testing.T) {
	p, d := simulated(t, enginesim.Config{}, enginesim.Config{})
	file := filepath.Join(t.TempDir(), "gateway.yaml")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
metadata: {name: one}
spec:
  model: tiny
  kvConnector: {type: nixl}
  discovery: {static: {endpoints: [{url: %q, role: prefill}, {url: %q, role: decode}]}}
`, p.URL(), d.URL()), 0o600))
	code, out, errs := verify(t, "-f", file, "--probes", "1")
	assert.Equal(t, exitOK, code, "%s%s", out, errs)
	code, _, errs = verify(t, "-f", file, "--connector", "nixxl")
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "did you mean nixl?")
	code, _, errs = verify(t, "-f", file, "--server", "two")
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "--server")
}

func TestVerifyRefusesWhatItCannotJudge(t *testing.T) {
	for args, want := range map[string]string{
		"--connector nixl": "needs a prefill and a decode engine",
		"--connector nixl --prefill http://127.0.0.1:1 --decode " +
			"nonsense": "--decode",
		"--connector nixl --config {] --prefill http://127.0.0.1:1 --decode " +
			"http://127.0.0.1:1": "--config is not JSON",
		`--connector nixl --config {"a":1} --prefill http://127.0.0.1:1 --decode ` +
			`http://127.0.0.1:1`: "unknown",
		"--connector nixl --prefill http://127.0.0.1:1 --decode " +
			"http://127.0.0.1:2": "nothing could be judged",
		"--gateway http://127.0.0.1:3 --header secret --prefill http://127.0.0.1:1 --decode " +
			"http://127.0.0.1:2": "--header is not NAME: VALUE",
		"-f /there/is/no/such/file --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2 " +
			"--connector nixl": "no such file",
		"--connector nixl --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2 " +
			"--timeout soon": "timeout",
		"--connector nixl --prefill http://127.0.0.1:1,http://127.0.0.1:5 --decode http://127.0.0.1:2 " +
			"--probes notany": "probes",
	} {
		code, _, errs := verify(t, strings.Fields(args)...)
		assert.Equal(t, exitUsage, code, args)
		assert.Contains(t, errs, want, args)
		assert.NotContains(t, errs, "secret")
	}
}

func TestVerifyBringsTheEnginesTheirKey(t *testing.T) {
	p, d := simulated(t, enginesim.Config{}, enginesim.Config{})
	locked := func(e *enginesim.Engine) string {
		target, err := url.Parse(e.URL())
		require.NoError(t, err)
		proxy := httputil.NewSingleHostReverseProxy(target)
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer k1" {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			_ = http.NewResponseController(w).EnableFullDuplex() // else it may break a response off (golang/go#40747)
			proxy.ServeHTTP(w, r)
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	key := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(key, []byte("k1\n"), 0o600))
	args := []string{"--connector", "nixl", "--prefill", locked(p), "--decode", locked(d), "--probes", "1"}
	code, out, errs := verify(t, append(args, "--engine-key", key)...)
	assert.Equal(t, exitOK, code, "%s%s", out, errs)
	code, _, errs = verify(t, args...)
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "401")
}
