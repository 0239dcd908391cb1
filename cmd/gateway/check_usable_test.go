// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/sharedtest"
)

// -check refuses what is well formed and cannot serve: `gateway -check && mv` must not let it through.
func TestCheckRefusesWhatCannotServe(t *testing.T) {
	t.Chdir(t.TempDir())
	const dir = "conf" // to which the paths in the configuration are relative
	require.NoError(t, os.Mkdir(dir, 0o700))
	a := sharedtest.NewAuthority(t, "a")
	issue(t, a, dir, "good")
	a.Life = -time.Minute
	issue(t, a, dir, "expired")
	lists(t, filepath.Join(dir, "junk"), "junk\n")
	lists(t, filepath.Join(dir, "empty"), "")
	lists(t, filepath.Join(dir, "ca.PEM"), string(a.PEM))
	lists(t, filepath.Join(dir, "prefill.yaml"), `endpoints: [{url: "http://h:1", role: prefill}]`)
	lists(t, filepath.Join(dir, "v1.yaml"), `endpoints: [{url: "http://h:1/v1", role: both}]`)
	const head = "apiVersion: networking.matrixinfer.ai/v1alpha1\nkind: ModelServer\nspec:\n  model: m\n  "
	list := func(engines string) string { return head + "discovery: {static: {endpoints: [" + engines + "]}}\n  " }
	const p, d = `{url: "http://p:1", role: prefill}`, `{url: "http://d:1", role: decode}`
	front := list(p+", "+d) + "\n---\napiVersion: pdkit.dev/v1alpha1\nkind: Gateway\nspec: {"
	secure := list(`{url: "https://h:1", role: both}`)
	for name, c := range map[string]struct{ yaml, fault string }{
		"good files": {front + "tls: {certFile: good.pem, keyFile: good-key.pem, clientCAFile: ca.PEM}}", ""},
		"key missing": {front + "tls: {certFile: good.pem, keyFile: none}}",
			":10: spec.tls: is of no use: transport: key file "},
		"another's key":       {front + "tls: {certFile: good.pem, keyFile: expired-key.pem}}", "spec.tls: is of"},
		"certificate is junk": {front + "tls: {certFile: junk, keyFile: good-key.pem}}", "spec.tls: is of"},
		"certificate expired": {front + "tls: {certFile: expired.pem, keyFile: expired-key.pem}}",
			"spec.tls.certFile: has expired at "},
		"authorities are junk": {front + "tls: {certFile: good.pem, keyFile: good-key.pem, clientCAFile: junk}}",
			"spec.tls.clientCAFile: is of no use"},
		"token file missing": {front + "registrationTokenFile: none}", "spec.registrationTokenFile: is"},
		"token file empty":   {front + "registrationTokenFile: empty}", "spec.registrationTokenFile: is"},
		"kubeconfig missing": {front + "modelServers: {kubeconfig: none}}", "spec.modelServers.kubeconfig: is"},

		"engines' authorities missing": {secure + "tls: {caFile: none}", "spec.tls.caFile: is of no use"},
		"key for engines is junk":      {secure + "tls: {certFile: good.pem, keyFile: junk}", "spec.tls: is of"},
		"a model's kubeconfig": {head + "discovery: {kubernetes: {kubeconfig: none}}",
			"spec.discovery.kubernetes.kubeconfig: is of no use"},

		"no decode engine":  {list(p), ":5: spec.discovery.static.endpoints: has no decode engine"},
		"no prefill engine": {list(d), "spec.discovery.static.endpoints: has no prefill engine"},
		"decode may serve alone": {list(d) + "kvConnector: {type: nixl, fallback: connector, fallbackConnector: " +
			"{type: http, fallback: decode}}", ""},
		"no encode engine":     {list(p+", "+d) + "encoder: {type: example}", ""},
		"only images":          {list(`{url: "http://e:1", role: encode}`), "has no prefill engine"},
		"no decode in a file":  {head + "discovery: {file: {path: prefill.yaml}}", "file.path: has no decode engine"},
		"no such file":         {head + "discovery: {file: {path: none}}", "file.path: is of no use: cannot be read"},
		"no decode in DNS":     {head + "discovery: {dns: {prefill: p.example, port: 1}}", "dns: has no decode engine"},
		"no prefill in groups": {head + "workloadSelector: {pdGroup: {decodeLabels: {a: b}}}", "has no prefill engine"},
		"roles register":       {head + `discovery: {registration: {http: "127.0.0.1:1"}}`, ""},

		"an API's path": {list(`{url: "http://p:1/v1", role: prefill}, ` + d),
			"endpoints[0].url: is not an engine's address (the path ends in /v1, which each request adds itself)"},
		"an API's path in a file": {head + "discovery: {file: {path: v1.yaml}}", "the path ends in /v1"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(dir, "config.yaml")
			lists(t, file, c.yaml)
			code, stdout, stderr := check(t, "-config", file)
			if c.fault == "" {
				assert.Equal(t, exitOK, code, stderr)
				return
			}
			assert.Equal(t, exitWrong, code, stdout)
			assert.Empty(t, stdout)
			assert.Contains(t, stderr, c.fault)
		})
	}
}

// What is not there yet does not end a start: a list may be written, or an engine listed, while the gateway runs.
func TestAStartDoesNotNeedAnEngineOfEachRole(t *testing.T) {
	g := start(t, gatewayYAML("")+fmt.Sprintf("apiVersion: networking.matrixinfer.ai/v1alpha1\nkind: ModelServer\n"+
		"spec: {model: m, discovery: {static: {endpoints: [{url: %q, role: decode}]}}}\n", newEngine(t).URL))
	status, header, _ := do(t, http.MethodPost, g.client+"/v1/completions", completion)
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.NotEmpty(t, header.Get("Retry-After"))
}
