// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

func verify(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	return pdctl(t, "", append([]string{"verify"}, args...)...)
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
	took := gjson.Get(out, "probes.0.tookSeconds").Float()
	assert.True(t, took > 0 && took < 60, "in seconds: %v", took)
	assert.NotContains(t, out, "keys and values of this prompt", "no prompt")
}

func TestVerifyReadsAModelServersFile(t *testing.T) {
	p, d := simulated(t, enginesim.Config{}, enginesim.Config{})
	file := written(t, fmt.Sprintf(`apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
metadata: {name: one}
spec:
  model: tiny
  kvConnector: {type: nixl}
  discovery: {static: {endpoints: [{url: %q, role: prefill}, {url: %q, role: decode}]}}
`, p.URL(), d.URL()))
	code, out, errs := verify(t, "-f", file, "--probes", "1")
	assert.Equal(t, exitOK, code, "%s%s", out, errs)
	code, _, errs = verify(t, "-f", file, "--connector", "nixxl")
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "did you mean nixl?")
	code, _, errs = verify(t, "-f", file, "--server", "two")
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "--server")
}

func TestAddressesNeedNoScheme(t *testing.T) {
	p, d := simulated(t, enginesim.Config{}, enginesim.Config{})
	bare := func(url string) string { return strings.TrimPrefix(url, "http://") }
	code, out, errs := verify(t, "--connector", "http", "--prefill", bare(p.URL()), "--decode", bare(d.URL()),
		"--gateway", bare(d.URL()), "--alone", bare(p.URL()), "--model", "tiny", "--probes", "1")
	assert.Equal(t, exitFaults, code, errs)
	assert.Contains(t, out, "not reused")
	for _, flag := range []string{"--gateway", "--alone"} {
		code, _, errs = verify(t, "--connector", "http", "--prefill", p.URL(), "--decode", d.URL(), flag, "nonsense")
		assert.Equal(t, exitUsage, code)
		assert.Equal(t, "pdctl: "+flag+" is no URL; write one like http://127.0.0.1:8000\n", errs)
	}
}

func TestVerifyRefusesWhatItCannotJudge(t *testing.T) {
	const pair = " --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2"
	for args, want := range map[string]string{
		"--connector nixl": "needs a prefill and a decode engine",
		"--connector nixl --prefill http://127.0.0.1:1 --decode nonsense":         "--decode",
		"--connector nixl --config {]" + pair:                                     "--config is not JSON",
		`--connector nixl --config {"a":1}` + pair:                                "unknown",
		"--connector nixl" + pair:                                                 "nothing could be judged",
		"--gateway http://127.0.0.1:3 --header secret" + pair:                     "--header is not NAME: VALUE",
		"-f /there/is/no/such/file --connector nixl" + pair:                       "no such file",
		"--connector nixl --timeout soon" + pair:                                  "timeout",
		"--connector nixl --probes notany --prefill http://h:1,http://h:5" + pair: "probes",
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
	key := written(t, "k1\n")
	args := []string{"--connector", "nixl", "--prefill", locked(p), "--decode", locked(d), "--probes", "1"}
	code, out, errs := verify(t, append(args, "--engine-key", key)...)
	assert.Equal(t, exitOK, code, "%s%s", out, errs)
	code, _, errs = verify(t, args...)
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "401")
}
