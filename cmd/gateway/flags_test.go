// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/internal/cmdline"
	"github.com/pdkit/pdkit/cmd/otlp/otlptest"
	"github.com/pdkit/pdkit/internal/sharedtest"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestFlagsOverrideTheFile(t *testing.T) {
	file := write(t, "apiVersion: pdkit.dev/v1alpha1\nkind: Gateway\nspec: {listen: 127.0.0.1:1, admin: 127.0.0.1:2}\n"+
		"---\n"+modelYAML(""))
	for args, want := range map[string]string{
		"":                              "listen        127.0.0.1:1\nadmin         127.0.0.1:2\n",
		"-listen=127.0.0.1:3 -admin=:4": "listen        127.0.0.1:3\nadmin         :4\n",
		"-admin=":                       "admin         off\n",
	} {
		_, stdout, _ := check(t, append([]string{"-config", file}, strings.Fields(args)...)...)
		assert.Contains(t, stdout, want, args)
	}
}

// What cannot be meant is told, and ends the program.
func TestAWrongCommandLineEndsWith2(t *testing.T) {
	file := write(t, modelYAML(""))
	for args, says := range map[string]string{
		"":                                                   "-config FILE is missing",
		"-config=":                                           "-config FILE is missing",
		"-config=FILE extra":                                 "unexpected argument",
		"-config=FILE -nonsense":                             "there is no flag -nonsense",
		"-config=FILE -log-level=loud":                       "loud",
		"-config=FILE -listen=8000":                          "-listen: is not an address",
		"-config=FILE -admin=nowhere":                        "-admin: is not an address",
		"-config=FILE -listen=127.0.0.1:9000":                "-admin: is the address of listen too",
		"-config=FILE -synthetic-probe=often":                "often",
		"-config=FILE -synthetic-probe=-1s":                  "-synthetic-probe: is negative",
		"-config=FILE -inspect=-1s":                          "-inspect: is negative",
		"-config=FILE -http-client=curl":                     "must be own or nethttp",
		"-config=FILE -pick=fastest":                         "want one of round-robin",
		"-config=FILE -record-decisions=FILE":                "-record-decisions: is no folder",
		"-config=FILE -record-decisions=. -record-share=0":   "-record-share: is no share",
		"-config=FILE -record-decisions=. -record-share=NaN": "-record-share: is no share",
		"-config=FILE -record-decisions=/sys":                "-record-decisions: is a folder that the gateway may not",
		"-config=FILE -record-share=1":                       "-record-share: records nothing without",
		"-config=FILE.none":                                  "file: cannot be read",
	} {
		code, stdout, stderr := check(t, strings.Fields(strings.Replace(args, "FILE", file, 1))...)
		assert.Equal(t, exitWrong, code, args)
		assert.Empty(t, stdout, args)
		assert.Contains(t, stderr, says, args)
	}
	code, _, stderr := check(t, "-help")
	assert.Equal(t, exitOK, code, "help is no fault")
	assert.Contains(t, stderr, "-config FILE")
}

// The gateway serves with each policy, and with each client that speaks to the engines.
func TestPoliciesAndClientsServe(t *testing.T) {
	p, d := startPair(t)
	flags := []string{"-http-client=own", "-http-client=nethttp"}
	for _, policy := range append(pick.Policies(), "session=X-User", "zone=a") {
		flags = append(flags, "-pick="+policy)
	}
	for _, flag := range flags {
		g := start(t, gatewayYAML("")+simYAML("", p, d), flag)
		status, h, body := g.complete(`{"model":"tiny","prompt":"the secret prompt","max_tokens":4}`)
		require.Equal(t, http.StatusOK, status, "%s: %s", flag, body)
		assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"), flag)
		f, err := parseFlags([]string{"-config=x", flag}, &strings.Builder{})
		require.NoError(t, err)
		cfg := configuration{gateway: gatewaySpec{Listen: "127.0.0.1:0"}}
		require.NoError(t, f.override(&cfg))
		assert.Equal(t, flag == "-http-client=nethttp", cfg.netHTTP)
	}

	p2, d2 := startPair(t)
	g := start(t, gatewayYAML("")+simYAML("", p, d, p2, d2), "-pick=session=X-User")
	before := p.Stats().Requests
	for i := range 8 {
		status, _, body := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":"%d","max_tokens":1}`, i), "X-User", "one")
		require.Equal(t, http.StatusOK, status, body)
	}
	assert.Contains(t, []int64{0, 8}, p.Stats().Requests-before, "a session stays where it is")
}

// What was made before the fault ends, too: the tests look for goroutines that are left.
func TestAStartThatFailsEndsWith1(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	taken, good := ln.Addr().String(), gatewayYAML("")+modelYAML("")
	for name, c := range map[string]struct {
		yaml, flag, variable, value string
		says                        string
	}{
		"clients' address in use":   {good, "-listen=" + taken, "", "", "cannot listen for clients"},
		"operators' address in use": {good, "-admin=" + taken, "", "", "cannot listen for admin"},
		"engines' address in use": {gatewayYAML("") + announcing("m", "http", "listen: 127.0.0.1:0, http: "+taken),
			"", "", "", "cannot listen for HTTP"},
		// cmd/gateway/README.md: left out, kubeconfig is the cluster that the gateway runs in.
		"outside of a cluster": {gatewayYAML("") + serverYAML("m", "  workloadSelector: {matchLabels: {app: m}}\n"), "",
			"", "", "kubeconfig"},
		"a wrong variable of telemetry": {good, "", "OTEL_TRACES_EXPORTER", "zipkin",
			"OTEL_TRACES_EXPORTER is wrong; write otlp, console or none"},
		"a file of spans in no folder": {good, "-trace=" + filepath.Join(t.TempDir(), "none", "spans.json"),
			"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", otlptest.Start(t).HTTP + "/v1/metrics",
			"trace: the file cannot be opened for writing"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.variable != "" {
				t.Setenv(c.variable, c.value)
			}
			log := &sharedtest.Log{}
			args := append([]string{"-config", write(t, c.yaml)}, strings.Fields(c.flag)...)
			assert.Equal(t, exitFailed, run(args, log, log, nil), log)
			assert.Contains(t, log.String(), c.says)
		})
	}
}

func TestTheVersionIsTold(t *testing.T) {
	var out, errs strings.Builder
	assert.Equal(t, exitOK, run([]string{"-version"}, &out, &errs, nil))
	assert.Equal(t, cmdline.Line("gateway")+"\n", out.String())
	assert.Empty(t, errs.String())
	g := start(t, gatewayYAML("")+pairYAML("m", newEngine(t), newEngine(t), ""))
	first, _, _ := strings.Cut(g.log.String(), "\n")
	assert.Contains(t, first, "version="+cmdline.Version())
}

func TestAWrongFlagGetsTheNearestName(t *testing.T) {
	_, _, stderr := check(t, "-confg", "x")
	assert.Equal(t, "gateway: there is no flag -confg; did you mean -config? (gateway -help lists the flags)\n", stderr)
}
