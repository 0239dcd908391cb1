// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func noEnv(string) string { return "" }

func parse(t *testing.T, getenv func(string) string, args ...string) (*flags, string) {
	t.Helper()
	var stderr bytes.Buffer
	f, err := parseFlags(args, getenv, &stderr)
	if err != nil {
		return nil, stderr.String()
	}
	return f, ""
}

func TestDefaultsAreThoseOfTheSidecarThatItReplaces(t *testing.T) {
	f, problem := parse(t, noEnv, "--prefillers=p:1")
	require.Empty(t, problem)
	assert.Equal(t, flags{
		port: 8000, modelServerPort: 8200, kvConnector: "nixlv2", mooncakePort: 8998, p2pPort: 7777, sglangPort: 8998,
		backoff: 200 * time.Millisecond, maxIdle: 1024, secure: true, prefillers: "p:1",
	}, *f)
	env := map[string]string{"MOONCAKE_BOOTSTRAP_PORT": "1", "P2P_CONNECTOR_PORT": "2", "SGLANG_BOOTSTRAP_PORT": "3", "ENABLE_PREFILLER_SAMPLING": "true"}
	f, problem = parse(t, func(name string) string { return env[name] }, "--prefillers=p:1", "--vllm-port=8001", "--enable-tls=prefiller", "--enable-tls=decoder", "--tls-insecure-skip-verify=prefiller,decoder")
	require.Empty(t, problem)
	assert.Equal(t, []any{1, 2, 3, true, 8001, stages{true, true}, stages{true, true}}, []any{f.mooncakePort, f.p2pPort, f.sglangPort, f.sampling, f.modelServerPort, f.tls, f.insecure})
	f, _ = parse(t, noEnv, "--prefillers=p:1", "--vllm-port=8001", "--model-server-port=8002")
	assert.Equal(t, 8002, f.modelServerPort, "the new name wins over the old")
}

func TestFlagsThatCannotBeServedEndTheStart(t *testing.T) {
	for args, part := range map[string]string{
		"": "--prefillers-dns is missing",
		"--prefillers=p:1 --prefillers-dns-server=a:1":        "no use",
		"--prefillers=p:1 x":                                  "unexpected argument",
		"--prefillers=p:1 --port=70000":                       "--port",
		"--prefillers=p:1 --port=8200":                        "would call itself",
		"--prefillers=p:1 --vllm-port=0":                      "--model-server-port",
		"--prefillers=p:1 --connector=nixl":                   "nixlv2",
		"--prefillers=p:1 --enable-tls=all":                   "want prefiller, decoder",
		"--prefillers=p:1 --prefill-max-retries=-1":           "negative",
		"--prefillers=p:1 --tls-insecure-skip-verify=decoder": "--enable-tls does not",
		"--prefillers=p:1 --secure-proxy=false --cert-path=x": "no use",
		"--prefillers=p:1 --enable-ssrf-protection=false":     "switch the list of prefill engines off",
		"--prefillers=p:1 --data-parallel-size=2":             "one sidecar for each",
		"--prefillers=p:1 --inference-pool=a/b":               "--prefillers-file",
		"--prefillers=p:1 --ec-connector=ec-nixl":             "encode stage",
		"--prefillers=p:1 --unheard-of":                       "not defined",
	} {
		_, problem := parse(t, noEnv, strings.Fields(args)...)
		assert.Contains(t, problem, part, args)
	}
	f, problem := parse(t, noEnv, "--prefillers=p:1", "--enable-ssrf-protection", "--data-parallel-size=1", "--ec-connector=", "--tracing=false", "--metrics-port=0", "--decode-chunk-size=0")
	assert.NotNil(t, f, "what spells out a default is taken: %s", problem)
}

func TestWhatCannotBeBuiltEndsTheStart(t *testing.T) {
	for args, part := range map[string]string{
		"--prefillers=p":                                      "HOST:PORT",
		"--prefillers=http://p:1":                             "HOST:PORT",
		"--prefillers-dns=p:x":                                "NAME:PORT",
		"--prefillers-dns=p:99999":                            "Port",
		"--prefillers-dns=a..b":                               "--prefillers-dns",
		"--prefillers=p:1/x":                                  "HOST:PORT",
		"--prefillers=p:1 --kv-connector=nixlv3":              "--kv-connector",
		"--prefillers=p:1 --kv-connector-config=7":            "not a JSON object",
		"--prefillers=p:1 --kv-connector-config={\"nope\":1}": "nope",
		"--prefillers=p:1 --kv-connector=p2pnccl":             "zmqAddress",
	} {
		var said logBuffer
		assert.Equal(t, exitWrong, run(t.Context(), strings.Fields(args), noEnv, &said), args)
		assert.Contains(t, said.String(), part, args)
	}
	var said logBuffer
	assert.Equal(t, exitFailed, run(t.Context(), []string{"--port=0", "--prefillers=p:1", "--cert-path=" + t.TempDir()}, noEnv, &said))
	assert.Contains(t, said.String(), "--cert-path")
}

func TestClientsAreServedOverTLSByDefault(t *testing.T) {
	p, d, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	x := start(t, nil, "--port=0", "--vllm-port="+portOf(t, d.URL()), "--prefillers="+hostPort(t, p.URL()))
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // it is self-signed
	status, h, answer := ask(t, client, http.MethodPost, "https://"+x.addr+"/v1/completions", completion(0, false), header, hostPort(t, p.URL()))
	require.Equal(t, http.StatusOK, status, answer)
	assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"))
}

func TestACertificateIsReadAgainWhenItChanges(t *testing.T) {
	dir := t.TempDir()
	write := func(at time.Time) *x509.CertPool {
		pair, err := selfSigned()
		require.NoError(t, err)
		key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "tls.key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "tls.crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), 0o600))
		require.NoError(t, os.Chtimes(filepath.Join(dir, "tls.crt"), at, at))
		pool := x509.NewCertPool()
		cert, err := x509.ParseCertificate(pair.Certificate[0])
		require.NoError(t, err)
		pool.AddCert(cert)
		return pool
	}
	first := write(time.Now().Add(-time.Hour))
	d, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	x := start(t, nil, "--port=0", "--vllm-port="+portOf(t, d.URL()), "--prefillers=p:1", "--cert-path="+dir)
	trusts := func(pool *x509.CertPool) bool {
		conn, err := tls.Dial("tcp", x.addr, &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true}) // looked at below
		if err != nil {
			return false
		}
		defer conn.Close()
		_, err = conn.ConnectionState().PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool})
		return err == nil
	}
	require.True(t, trusts(first))
	second := write(time.Now())
	require.False(t, trusts(second) && trusts(first), "two certificates at once")
	require.Eventually(t, func() bool { return trusts(second) }, 10*time.Second, 50*time.Millisecond)
}

// The engines are behind TLS that nobody can verify: without --tls-insecure-skip-verify nothing is sent to them.
func TestEnginesAreAskedOverTLSWhereTheFlagsSaySo(t *testing.T) {
	p, d, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	over := func(e *enginesim.Engine) *httptest.Server {
		u, err := url.Parse(e.URL())
		require.NoError(t, err)
		proxy := httputil.NewSingleHostReverseProxy(u)
		proxy.Transport = &http.Transport{DisableKeepAlives: true}
		s := httptest.NewUnstartedServer(proxy)
		s.Config.ErrorLog = log.New(io.Discard, "", 0) // of refused handshakes, which are the test
		s.StartTLS()
		t.Cleanup(s.Close)
		return s
	}
	sp, sd := over(p), over(d)
	common := []string{"--port=0", "--secure-proxy=false", "--vllm-port=" + portOf(t, sd.URL), "--prefillers=" + hostPort(t, sp.URL), "--enable-tls=prefiller,decoder"}
	for skip, want := range map[string]int{"prefiller,decoder": http.StatusOK, "prefiller": http.StatusBadGateway, "decoder": http.StatusBadGateway} {
		x := start(t, nil, append(common, "--tls-insecure-skip-verify="+skip)...)
		status, _, answer := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions", completion(0, false), header, hostPort(t, sp.URL))
		assert.Equal(t, want, status, "%s: %s", skip, answer)
	}
}
