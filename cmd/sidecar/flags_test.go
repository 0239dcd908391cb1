// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log"
	"log/slog"
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

	"github.com/pdkit/pdkit/cmd/internal/cmdline"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/internal/sharedtest"
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
		port: 8000, modelServerPort: 8200, ranks: 1, kvConnector: "nixlv2", mooncakePort: 8998, p2pPort: 7777,
		sglangPort: 8998,
		moriio: moriioFlags{decodeHandshake: 6301, decodeNotify: 61005, prefillHandshake: 6301, prefillNotify: 61005,
			tp: 1, dp: 1},
		backoff: 200 * time.Millisecond, maxIdle: 1024, secure: true, minTLS: tls.VersionTLS12,
		prefill: listFlags{static: "p:1"},
		pool:    poolFlags{group: "inference.networking.k8s.io"},
	}, *f)
}

func TestVariablesOfTheEnvironmentAreDefaults(t *testing.T) {
	env := map[string]string{
		"MOONCAKE_BOOTSTRAP_PORT": "1", "P2P_CONNECTOR_PORT": "2", "SGLANG_BOOTSTRAP_PORT": "3",
		"ENABLE_PREFILLER_SAMPLING": "true", "POD_IP": "10.1.1.1",
		"INFERENCE_POOL_NAMESPACE": "ns", "INFERENCE_POOL_NAME": "pool", "MORIIO_METRICS_ADDR": ":9090",
		"KUBECONFIG": "/kube",
	}
	of := func(name string) string { return env[name] }
	f, problem := parse(t, of, "--prefillers=p:1")
	require.Empty(t, problem)
	assert.Equal(t, []any{1, 2, 3, true, "10.1.1.1", "10.1.1.1", ":9090"},
		[]any{f.mooncakePort, f.p2pPort, f.sglangPort, f.sampling, f.podIP, f.moriio.podIP, f.metrics})
	assert.Equal(t, poolFlags{"inference.networking.k8s.io", "ns", "pool", "/kube"}, f.pool)
	f, problem = parse(t, of, "--prefillers=p:1", "--mooncake-bootstrap-port=4", "--p2p-connector-port=5",
		"--enable-prefiller-sampling=false", "--metrics-port=9091", "--inference-pool=p2")
	require.Empty(t, problem)
	assert.Equal(t, []any{4, 5, false, ":9091"}, []any{f.mooncakePort, f.p2pPort, f.sampling, f.metrics}, "flags win")
	assert.Equal(t, poolFlags{"inference.networking.k8s.io", "default", "p2", "/kube"}, f.pool,
		"a name alone is in the namespace default, as in llm-d")
	env["INFERENCE_POOL"] = "a/b"
	f, _ = parse(t, of, "--prefillers=p:1")
	assert.Equal(t, poolFlags{"inference.networking.k8s.io", "a", "b", "/kube"}, f.pool)
}

func TestOldAndNewNamesOfAFlagMeanTheSame(t *testing.T) {
	for args, want := range map[string]func(*flags) bool{
		"--vllm-port=8001":                          func(f *flags) bool { return f.modelServerPort == 8001 },
		"--vllm-port=8001 --model-server-port=8002": func(f *flags) bool { return f.modelServerPort == 8002 },
		"--secure-proxy=false":                      func(f *flags) bool { return !f.secure },
		"--secure-serving=false":                    func(f *flags) bool { return !f.secure },
		"--connector=sglang":                        func(f *flags) bool { return f.kvConnector == "sglang" },
		"--enable-tls=prefiller --enable-tls=decoder,encoder": func(f *flags) bool {
			return f.tls == stages{true, true, true}
		},
		"--prefiller-use-tls=true --decoder-use-tls": func(f *flags) bool {
			return f.tls == stages{prefiller: true, decoder: true}
		},
		"--enable-tls=decoder --decoder-use-tls=false": func(f *flags) bool { return f.tls == stages{decoder: true} },
		"--decoder-use-tls --decoder-tls-insecure-skip-verify=true": func(f *flags) bool {
			return f.insecure == stages{decoder: true}
		},
		"--prefiller-use-tls --prefiller-tls-insecure-skip-verify": func(f *flags) bool {
			return f.insecure == stages{prefiller: true}
		},
		"--inference-pool-name=a --inference-pool-namespace=b": func(f *flags) bool {
			return f.pool.name == "a" && f.pool.namespace == "b"
		},
		"--pool-group=inference.networking.x-k8s.io": func(f *flags) bool {
			return f.pool.group == "inference.networking.x-k8s.io"
		},
		"--zap-log-level=1":              func(f *flags) bool { return f.level == slog.LevelInfo },
		"--zap-log-level=4":              func(f *flags) bool { return f.level == slog.LevelDebug },
		"--zap-log-level=error":          func(f *flags) bool { return f.level == slog.LevelError },
		"--v=5":                          func(f *flags) bool { return f.level == slog.LevelDebug },
		"--zap-encoder=json":             func(f *flags) bool { return f.json },
		"--tls-min-version=VersionTLS13": func(f *flags) bool { return f.minTLS == tls.VersionTLS13 },
		"--tls-cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": func(f *flags) bool {
			return f.ciphers[0] == tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
		},
		"--zap-devel --zap-stacktrace-level=error --zap-time-encoding=iso8601": func(f *flags) bool {
			return len(f.warnings) == 0
		},
		"--enable-p2p-pull=false --decode-chunk-size=0 --enable-speculative-prefill=false --metrics-port=0 " +
			"--tracing=false --moriio-dp-size-local=0": func(f *flags) bool { return len(f.warnings) == 0 },
		"--enable-ssrf-protection " +
			"--enable-ssrf-protection=true": func(f *flags) bool { return len(f.warnings) == 0 },
		"--enable-ssrf-protection=false": func(f *flags) bool { return len(f.warnings) == 1 },
		"--enable-p2p-pull --decode-chunk-size=64 --enable-speculative-prefill": func(f *flags) bool {
			return len(f.warnings) == 3
		},
		"--tls-insecure-skip-verify=decoder":   func(f *flags) bool { return len(f.warnings) == 1 },
		"--secure-serving=false --cert-path=x": func(f *flags) bool { return len(f.warnings) == 1 },
	} {
		f, problem := parse(t, noEnv, append(strings.Fields(args), "--prefillers=p:1")...)
		if assert.NotNil(t, f, "%s: %s", args, problem) {
			assert.True(t, want(f), "%s: %+v", args, f)
		}
	}
}

func TestFlagsThatCannotBeServedEndTheStart(t *testing.T) {
	for args, part := range map[string]string{
		"":                                  "--inference-pool is missing",
		"--inference-pool-name=p":           "--inference-pool-namespace",
		"--inference-pool=p --pool-group=x": "--pool-group",
		"--inference-pool=p --ec-connector=ec-nixl --enable-tls=encoder": "both or neither",
	} {
		f, problem := parse(t, noEnv, strings.Fields(args)...)
		assert.Nil(t, f, args)
		assert.Contains(t, problem, part, args)
	}
	const writes = "--moriio-write-mode --moriio-local-pod-ip=10.0.0.1 "
	for args, part := range map[string]string{
		"--prefillers-dns-server=a:1":                        "no use",
		"x":                                                  "unexpected argument",
		"--port=70000":                                       "--port",
		"--port=65535 --data-parallel-size=2":                "--port",
		"--port=8200":                                        "would call itself",
		"--port=8193 --data-parallel-size=8":                 "would call itself",
		"--port=8207 --data-parallel-size=8":                 "would call itself",
		"--vllm-port=0":                                      "--model-server-port",
		"--data-parallel-size=0":                             "--data-parallel-size",
		"--connector=nixl":                                   "nixlv2",
		"--enable-tls=all":                                   "want prefiller, decoder",
		"--decoder-use-tls=x":                                "invalid",
		"--prefill-max-retries=-1":                           "negative",
		"--inference-pool=a/b/c":                             "want NAMESPACE/NAME",
		"--ec-connector=ec-foo --encoders=e:1":               "ec-nixl",
		"--ec-connector=ec-nixl":                             "--encoders",
		"--encoders=e:1":                                     "--ec-connector",
		"--metrics-port=x":                                   "want a port",
		"--metrics-port=8000":                                "own ports",
		"--tls-min-version=VersionTLS11":                     "VersionTLS12",
		"--tls-cipher-suites=TLS_RSA_WITH_RC4_128_SHA":       "not safe",
		"--zap-log-level=loud":                               "want debug",
		"--zap-encoder=xml":                                  "want json",
		"--moriio-parallel-dispatch":                         "--moriio-write-mode",
		"--moriio-write-mode":                                "--moriio-local-pod-ip",
		"--moriio-write-mode --moriio-local-pod-ip=d.ns.svc": "is not an IP address",
		"--moriio-write-mode --moriio-local-pod-ip=::1 --kv-connector=sglang":                 "nixlv2",
		writes + "--data-parallel-size=2":                                                     "--moriio-dp-size",
		writes + "--moriio-dp-size=4 --moriio-dp-size-local=8":                                "--moriio-dp-size-local",
		writes + "--moriio-dp-size=4 --moriio-dp-size-local=2":                                "--moriio-decode-hosts",
		writes + "--moriio-dp-size=4 --moriio-dp-size-local=2 --moriio-decode-hosts=10.0.0.1": "2 pods",
		"--unheard-of": "there is no flag -unheard-of",
	} {
		f, problem := parse(t, noEnv, append([]string{"--prefillers=p:1"}, strings.Fields(args)...)...)
		assert.Nil(t, f, args)
		assert.Contains(t, problem, part, args)
	}
	_, problem := parse(t, func(name string) string { return map[string]string{"MORIIO_METRICS_ADDR": "9090"}[name] },
		"--prefillers=p:1")
	assert.Contains(t, problem, "MORIIO_METRICS_ADDR")
}

func TestWhatCannotBeBuiltEndsTheStart(t *testing.T) {
	for args, part := range map[string]string{
		"--prefillers=p":                                      "HOST:PORT",
		"--inference-pool=p":                                  "--inference-pool",
		"--prefillers=http://p:1":                             "HOST:PORT",
		"--prefillers=p:8-7":                                  "HOST:PORT",
		"--prefillers=p:1-9999":                               "HOST:PORT",
		"--prefillers-dns=p:x":                                "NAME:PORT",
		"--prefillers-dns=p:99999":                            "NAME:PORT",
		"--prefillers-dns=p:0":                                "NAME:PORT",
		"--prefillers-dns=a..b":                               "--prefillers-dns",
		"--prefillers=p:1/x":                                  "HOST:PORT",
		"--prefillers=p:1 --kv-connector=nixlv3":              "--kv-connector",
		"--kv-conector=nixlv2":                                "did you mean -kv-connector?",
		"--prefillers=p:1 --kv-connector-config=7":            "not a JSON object",
		"--prefillers=p:1 --kv-connector-config={\"nope\":1}": "nope",
		"--prefillers=p:1 --kv-connector=p2pnccl":             "zmqAddress",
		"--prefillers=p:1 --forward-headers=X-A,cookie":       "Cookie must not reach engines",
	} {
		var said sharedtest.Log
		assert.Equal(t, exitWrong, run(t.Context(), strings.Fields(args), noEnv, io.Discard, &said), args)
		assert.Contains(t, said.String(), part, args)
	}
	for name, args := range map[string][]string{
		"--cert-path":        {"--cert-path=" + t.TempDir()},
		"--metrics-cert-dir": {"--metrics-port=1", "--metrics-cert-dir=" + t.TempDir()},
	} {
		var said sharedtest.Log
		args = append(args, "--port=0", "--prefillers=p:1")
		assert.Equal(t, exitFailed, run(t.Context(), args, noEnv, io.Discard, &said))
		assert.Contains(t, said.String(), name)
	}
}

func TestClientsAreServedOverTLSByDefault(t *testing.T) {
	p, d := twoEngines(t, enginesim.Config{}, enginesim.Config{})
	x := start(t, nil, "--port=0", "--vllm-port="+portOf(t, d.URL()), "--prefillers="+hostPort(t, p.URL()))
	// it is self-signed
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	status, h, response := ask(t, client, http.MethodPost, "https://"+x.addr+"/v1/completions", completion(0, false),
		header, hostPort(t, p.URL()))
	require.Equal(t, http.StatusOK, status, response)
	assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"))
}

// writeCertificate writes tls.crt and tls.key, and returns a pool that trusts them.
func writeCertificate(t *testing.T, dir string) *x509.CertPool {
	t.Helper()
	pair, err := selfSigned()
	require.NoError(t, err)
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	require.NoError(t, err)
	require.NoError(
		t, os.WriteFile(filepath.Join(dir, "tls.key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}),
			0o600),
	)
	require.NoError(
		t, os.WriteFile(filepath.Join(dir, "tls.crt"),
			pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), 0o600),
	)
	cert, err := x509.ParseCertificate(pair.Certificate[0])
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return pool
}

func TestACertificateIsReadAgainWhenItChanges(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(at time.Time) *x509.CertPool {
		pool := writeCertificate(t, dir)
		require.NoError(t, os.Chtimes(filepath.Join(dir, "tls.crt"), at, at))
		return pool
	}
	first := write(time.Now().Add(-time.Hour))
	d := lone(t, enginesim.Config{})
	x := start(t, nil, "--port=0", "--vllm-port="+portOf(t, d.URL()), "--prefillers=p:1", "--cert-path="+dir)
	trusts := func(pool *x509.CertPool) bool {
		// looked at below
		conn, err := tls.Dial("tcp", x.addr, &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true})
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
	require.Eventually(t, func() bool { return trusts(second) }, 20*time.Second, 50*time.Millisecond)
}

// unverifiable serves an engine over TLS with a certificate that nobody can verify.
func unverifiable(t *testing.T, e *enginesim.Engine) *httptest.Server {
	t.Helper()
	u, err := url.Parse(e.URL())
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(u)
	proxy.Transport = &http.Transport{DisableKeepAlives: true}
	s := httptest.NewUnstartedServer(fullDuplex(proxy))
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // of refused handshakes, which are the test
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

// The engines have TLS certificates that nobody can verify. Without --tls-insecure-skip-verify the sidecar sends them
// nothing.
func TestEnginesAreAskedOverTLSWhereTheFlagsSaySo(t *testing.T) {
	p, d := twoEngines(t, enginesim.Config{}, enginesim.Config{})
	sp, sd := unverifiable(t, p), unverifiable(t, d)
	common := []string{"--port=0", "--secure-proxy=false", "--vllm-port=" + portOf(t, sd.URL), "--prefillers=" +
		hostPort(t, sp.URL), "--enable-tls=prefiller,decoder"}
	for skip, want := range map[string]int{"prefiller,decoder": http.StatusOK, "prefiller": http.StatusBadGateway,
		"decoder": http.StatusBadGateway} {
		x := start(t, nil, append(common, "--tls-insecure-skip-verify="+skip)...)
		status, _, response := complete(t, x.addr, 0, false, header, hostPort(t, sp.URL))
		assert.Equal(t, want, status, "%s: %s", skip, response)
	}
}

func TestEncodeEnginesAreAskedOverTLSWhereTheFlagsSaySo(t *testing.T) {
	for skip, want := range map[string]int{"encoder": http.StatusOK, "": http.StatusBadGateway} {
		x := staged(t, "ec-nixl")
		over := unverifiable(t, x.e)
		args := []string{"--port=0", "--secure-serving=false", "--vllm-port=" + portOf(t, x.d.URL()),
			"--ec-connector=ec-nixl", "--prefillers=" + hostPort(t, x.p.URL()),
			"--encoders=" + hostPort(t, over.URL), "--enable-tls=encoder"}
		if skip != "" {
			args = append(args, "--tls-insecure-skip-verify="+skip)
		}
		side := start(t, nil, args...)
		status, _, response := ask(t, http.DefaultClient, http.MethodPost, "http://"+side.addr+"/v1/chat/completions",
			chatWith(0, false), header, hostPort(t, x.p.URL()), encoders, hostPort(t, over.URL))
		assert.Equal(t, want, status, "%q: %s", skip, response)
	}
}

func TestTheLowestVersionAndTheSuitesHoldTowardsClients(t *testing.T) {
	d := lone(t, enginesim.Config{})
	serves := func(client *tls.Config, args ...string) bool {
		x := start(t, nil, append(args, "--port=0", "--vllm-port="+portOf(t, d.URL()), "--prefillers=p:1")...)
		client.InsecureSkipVerify = true // it is self-signed
		conn, err := tls.Dial("tcp", x.addr, client)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	}
	const suite, other = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384
	old := func() *tls.Config { return &tls.Config{MinVersion: tls.VersionTLS12, MaxVersion: tls.VersionTLS12} }
	assert.True(t, serves(old()))
	assert.False(t, serves(old(), "--tls-min-version=VersionTLS13"))
	narrow := old()
	narrow.CipherSuites = []uint16{other}
	assert.True(t, serves(narrow.Clone()))
	assert.False(t, serves(narrow.Clone(), "--tls-cipher-suites="+suite))
	assert.True(t, serves(old(), "--tls-cipher-suites="+suite))
}

func TestTheVersionIsTold(t *testing.T) {
	var out, errs strings.Builder
	assert.Equal(t, exitOK, run(t.Context(), []string{"-version"}, noEnv, &out, &errs))
	assert.Equal(t, cmdline.Line("sidecar")+"\n", out.String())
	assert.Empty(t, errs.String())
}
