// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

const asProgram = "PDKIT_TEST_AS_SIDECAR"

// TestMain is the sidecar itself where a test starts the test binary as that. Tests that wait run beside each other.
func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	kubetest.Main(m)
}

// command is the sidecar as a process of its own, with what main does besides run: real signals and exit codes. It ends
// with ctx.
func command(ctx context.Context, t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	return cmd
}

const header = "x-prefiller-host-port" // as llm-d's scheduler writes it

// program is the sidecar, running inside the test.
type program struct {
	addr string // host:port
	log  *sharedtest.Log
	stop func() int
}

var servingLine = regexp.MustCompile(`msg=serving listen=\S*:(\d+)`)

func start(t *testing.T, env map[string]string, args ...string) *program {
	t.Helper()
	p := &program{log: &sharedtest.Log{}}
	ctx, cancel := context.WithCancel(context.Background())
	code := make(chan int, 1)
	go func() { code <- run(ctx, args, func(name string) string { return env[name] }, io.Discard, p.log) }()
	p.stop = sync.OnceValue(func() int { cancel(); return <-code })
	t.Cleanup(func() { assert.Equal(t, exitOK, p.stop(), "%s", p.log); http.DefaultClient.CloseIdleConnections() })
	require.Eventually(t, func() bool {
		m := servingLine.FindStringSubmatch(p.log.String())
		if m != nil {
			p.addr = "127.0.0.1:" + m[1]
		}
		return m != nil
	}, 20*time.Second, time.Millisecond, "%s", p.log)
	return p
}

// twoEngines starts a prefill and a decode engine, which end with the test.
func twoEngines(t *testing.T, prefill, decode enginesim.Config) (p, d *enginesim.Engine) {
	t.Helper()
	p, d, err := enginesim.Pair(prefill, decode)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	return p, d
}

// lone starts one engine, which ends with the test.
func lone(t *testing.T, config enginesim.Config) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.Start(config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	return e
}

// before starts a sidecar before the engine at a URL.
func before(t *testing.T, engine string, env map[string]string, args ...string) *program {
	t.Helper()
	return start(t, env, append([]string{"--port=0", "--secure-proxy=false", "--vllm-port=" + portOf(t, engine)},
		args...)...)
}

// pair starts two engines, and a sidecar before the decode engine that lists the prefill engine. Nobody takes the
// engines' ports when they have ended.
func pair(t *testing.T, prefill, decode enginesim.Config, env map[string]string, args ...string) (p,
	d *enginesim.Engine, side *program) {
	t.Helper()
	first := ports(t, 2)
	prefill.Listen, decode.Listen = "127.0.0.1:"+strconv.Itoa(first), "127.0.0.1:"+strconv.Itoa(first+1)
	p, d = twoEngines(t, prefill, decode)
	return p, d, before(t, d.URL(), env, append([]string{"--prefillers=" + hostPort(t, p.URL())}, args...)...)
}

func hostPort(t *testing.T, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	require.NoError(t, err)
	return u.Host
}

func portOf(t *testing.T, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	require.NoError(t, err)
	return u.Port()
}

func ask(t *testing.T, client *http.Client, method, url, body string, headers ...string) (status int, h http.Header,
	response string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Close = true
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, resp.Header, string(b)
}

// complete sends completion(n, stream) to HOST:PORT.
func complete(t *testing.T, addr string, n int, stream bool, headers ...string) (status int, h http.Header,
	response string) {
	t.Helper()
	return ask(t, http.DefaultClient, http.MethodPost, "http://"+addr+"/v1/completions", completion(n, stream),
		headers...)
}

// fetch asks for HOST:PORT/PATH.
func fetch(t *testing.T, at string, headers ...string) (status int, h http.Header, response string) {
	t.Helper()
	return ask(t, http.DefaultClient, http.MethodGet, "http://"+at, "", headers...)
}

// statusOf is the status of what ask, complete and fetch return.
func statusOf(status int, _ http.Header, _ string) int { return status }

// prompt is 400 bytes, which are 400 tokens of the toy model, more than a chunk of LMCache.
var prompt = strings.Repeat("a cat on a mat that ", 20)

func completion(n int, stream bool) string {
	return fmt.Sprintf(`{"model":"tiny","prompt":"%d %s","max_tokens":12,"temperature":0,"stream":%t}`, n, prompt,
		stream)
}

// text is the text of a response, whole or streamed.
func text(response string) string {
	var b strings.Builder
	for line := range strings.Lines(response) {
		b.WriteString(gjson.Get(strings.TrimPrefix(line, "data: "), "choices.0.text").String())
	}
	return b.String()
}

// For each name that llm-d's sidecars have for a protocol, a request with the header is served by both engines: decode
// takes over the KV that prefill has computed, and the text is that of one engine alone.
func TestARequestWithTheHeaderIsServedByBothEngines(t *testing.T) {
	store := func(t *testing.T, name string) enginesim.Config {
		return enginesim.Config{Connector: name, KVRole: enginesim.RoleBoth,
			Extra: map[string]string{"store": t.TempDir(), "hash_seed": "0", "shared_storage_path": t.TempDir()}}
	}
	bootstrap := func(t *testing.T, p *enginesim.Engine) string { return portOf(t, p.Bootstrap()) }
	side := func(t *testing.T, p *enginesim.Engine) string { return portOf(t, "tcp://"+p.SideChannel()) }
	for name, c := range map[string]struct {
		connector string // the engines' connector
		flag      string
		port      func(*testing.T, *enginesim.Engine) string
		portFlag  string
		portEnv   string
	}{
		"nixlv2":         {connector: "nixl", flag: "--kv-connector=nixlv2"},
		"the default":    {connector: "nixl", flag: "--log-level=info"},
		"the old flag":   {connector: "nixl", flag: "--connector=nixlv2"},
		"shared-storage": {connector: "sharedstorage", flag: "--kv-connector=shared-storage"},
		"lmcache":        {connector: "lmcache", flag: "--connector=lmcache"},
		"sglang": {connector: "sglang", flag: "--kv-connector=sglang", port: bootstrap,
			portEnv: "SGLANG_BOOTSTRAP_PORT"},
		"mooncake": {connector: "mooncake", flag: "--kv-connector=mooncake", port: bootstrap,
			portFlag: "--mooncake-bootstrap-port="},
		"mooncake, env": {connector: "mooncake", flag: "--kv-connector=mooncake", port: bootstrap,
			portEnv: "MOONCAKE_BOOTSTRAP_PORT"},
		"offloading": {connector: "offload-p2p", flag: "--kv-connector=offloading", port: side,
			portFlag: "--p2p-connector-port="},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := enginesim.Config{Connector: c.connector}
			if c.connector == "lmcache" || c.connector == "sharedstorage" {
				config = store(t, c.connector)
			}
			p, d := twoEngines(t, config, config)
			alone := lone(t, enginesim.Config{})
			env := map[string]string{}
			args := []string{"--port=0", "--secure-proxy=false", "--model-server-port=" + portOf(t, d.URL()),
				"--prefillers=" + hostPort(t, p.URL()), c.flag}
			if c.portFlag != "" {
				args = append(args, c.portFlag+c.port(t, p))
			}
			if c.portEnv != "" {
				env[c.portEnv] = c.port(t, p)
			}
			x := start(t, env, args...)
			for n, stream := range []bool{false, true} {
				body := completion(n, stream)
				status, h, response := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions",
					body, header, hostPort(t, p.URL()))
				require.Equal(t, http.StatusOK, status, "%s\n%s", response, x.log)
				assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"))
				_, _, want := ask(t, http.DefaultClient, http.MethodPost, alone.URL()+"/v1/completions", body)
				require.NotEmpty(t, text(response))
				assert.Equal(t, text(want), text(response))
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			require.NoError(t, p.WaitIdle(ctx))
			require.NoError(t, d.WaitIdle(ctx))
			assert.NoError(t, p.CheckKV())
			assert.NoError(t, d.CheckKV())
			assert.Positive(t, d.Stats().ExternalKVTransfer, "decode computed the prompts itself")
		})
	}
}

// 403 is llm-d's status for a header that names an engine which is not listed (pkg/sidecar/proxy/chat_completions.go).
func TestAHeaderThatNamesWhatIsNotListedIsRefused(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	asked := make(chan string, 10)
	outside := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Path
	}))
	defer outside.Close()
	for name, value := range map[string]string{
		"another host":                    "169.254.169.254:80",
		"another port of a listed host":   hostPort(t, outside.URL),
		"the decode engine itself":        hostPort(t, d.URL()),
		"a listed one and one that isn't": hostPort(t, p.URL()) + "," + hostPort(t, outside.URL),
		"a name of a listed address":      "localhost:" + portOf(t, p.URL()),
		"no port":                         "127.0.0.1",
		"a user":                          "http://a@b",
		"a path":                          hostPort(t, outside.URL) + "/x",
		"bytes":                           "\xff\xfe",
	} {
		status, h, response := complete(t, x.addr, 0, false, header, value)
		assert.Equal(t, http.StatusForbidden, status, name)
		assert.Equal(t, "application/json", h.Get("Content-Type"))
		assert.Equal(t, "X-Prefiller-Host-Port", gjson.Get(response, "error.param").String(), response)
		assert.NotContains(t, response, "127.0.0.1", "the response tells of addresses")
	}
	assert.Empty(t, asked, "somebody was called")
	assert.Empty(t, p.Requests())
	assert.Empty(t, d.Requests())
	assert.NotContains(t, x.log.String(), "169.254.169.254")
}

// llm-d's scheduler may name several engines, separated by commas, in several header lines, or both. Without
// --enable-prefiller-sampling the sidecar uses the first.
func TestSeveralEnginesInTheHeader(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	at := hostPort(t, p.URL())
	for n, headers := range [][]string{
		{header, at},
		{header, "http://" + at},
		{header, " " + at + " , " + at},
		{header, at, header, at},
		{header, ", ," + at},
		{"X-PREFILLER-HOST-PORT", at},
	} {
		status, h, response := complete(t, x.addr, n, false, headers...)
		require.Equal(t, http.StatusOK, status, "%q: %s", headers, response)
		assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"), "%q", headers)
	}
	assert.Len(t, p.Requests(), 6)
	for _, blank := range []string{"", " ", ","} {
		_, h, _ := complete(t, x.addr, 7, false, header, blank)
		assert.Equal(t, "aggregated", h.Get("X-Pd-Mode"), "%q names nobody", blank)
	}
	assert.Len(t, p.Requests(), 6)
	assert.Len(t, d.Requests(), 9)
}

func TestWithoutTheHeaderTheDecodeEngineServesAlone(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	status, h, response := complete(t, x.addr, 0, false)
	require.Equal(t, http.StatusOK, status, response)
	assert.Equal(t, "aggregated", h.Get("X-Pd-Mode"))
	assert.Equal(t, http.StatusOK, statusOf(complete(t, x.addr, 1, false)))
	assert.Empty(t, p.Requests())
	assert.Len(t, d.Requests(), 2)
	assert.Equal(t, 1, strings.Count(x.log.String(), "requests name no prefill engine"), "told once")
}

func TestEnginesGetTheHeadersThatAFlagNames(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil, "--forward-headers=x-tenant,X-Zone")
	require.Equal(t, http.StatusOK, statusOf(complete(t, x.addr, 0, false, header, hostPort(t, p.URL()),
		"X-Tenant", "t", "X-Zone", "z", "X-Api-Key", "k", "X-Other", "o")))
	for _, e := range []*enginesim.Engine{p, d} {
		h := e.Requests()[0].Header
		assert.Equal(t, "t z k ", strings.Join([]string{h.Get("X-Tenant"), h.Get("X-Zone"), h.Get("X-Api-Key"),
			h.Get("X-Other")}, " "))
	}
}

// Where each request must come from the scheduler, one that has gone round it is refused, also one that a single engine
// would serve anyway.
func TestTheHeaderCanBeRequired(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil, "--require-prefiller-header")
	for _, body := range []string{`{"prompt":"hello"}`, `{"prompt":["a","b"]}`} {
		status, _, response := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions", body)
		assert.Equal(t, http.StatusBadRequest, status, response)
		assert.Contains(t, response, `"param":"X-Prefiller-Host-Port"`)
	}
	assert.Empty(t, d.Requests())
	require.Equal(t, http.StatusOK, statusOf(complete(t, x.addr, 0, false, header, hostPort(t, p.URL()))))
	assert.Equal(t, http.StatusOK, statusOf(fetch(t, x.addr+"/v1/models")), "other paths need no scheduler")
}

func TestOtherPathsGoToTheEngineBesideIt(t *testing.T) {
	p, _, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	for path, part := range map[string]string{"/v1/models": `"tiny"`, "/version": `"version"`,
		"/metrics": "vllm:kv_cache_usage_perc"} {
		status, _, response := ask(t, http.DefaultClient, http.MethodGet, "http://"+x.addr+path, "", header,
			hostPort(t, p.URL()))
		assert.Equal(t, http.StatusOK, status, path)
		assert.Contains(t, response, part)
	}
	assert.Equal(t, http.StatusNotFound, statusOf(fetch(t, x.addr+"/nowhere")))
	assert.Empty(t, p.Requests())
}

func TestWhatPassesIsTheClientsRequestWithoutTheSchedulersHeaders(t *testing.T) {
	got := make(chan *http.Request, 1)
	engine := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r }))
	defer engine.Close()
	x := before(t, engine.URL, nil, "--prefillers=p:1")
	status, _, _ := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/tokenize?a=b", `{"prompt":"x"}`,
		header, "p:1", "Authorization", "Bearer k",
		encoders, "e:1", "x-data-parallel-host-port", "d:1", "x-kv-cache-source-host-port", "p:2")
	require.Equal(t, http.StatusOK, status)
	r := <-got
	assert.Equal(t, "POST /tokenize?a=b", r.Method+" "+r.URL.String())
	assert.Equal(t, "Bearer k", r.Header.Get("Authorization"))
	for _, name := range []string{header, encoders, "x-data-parallel-host-port", "x-kv-cache-source-host-port"} {
		assert.Empty(t, r.Header.Values(name), name)
	}
}

func TestHealthIsTheSidecarsOwn(t *testing.T) {
	_, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	require.NoError(t, d.Close())
	assert.Equal(t, http.StatusOK, statusOf(fetch(t, x.addr+"/health")), "llm-d's responses without asking the engine")
}

// 503 is llm-d's status for a decode engine that has not started yet: clients and gateways then try again.
func TestADecodeEngineThatIsNotThereIs503(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	require.NoError(t, d.Close())
	for name, send := range map[string]func() (int, http.Header, string){
		"alone": func() (int, http.Header, string) {
			return complete(t, x.addr, 0, false)
		},
		"a pair": func() (int, http.Header, string) {
			return complete(t, x.addr, 0, true, header, hostPort(t, p.URL()))
		},
		"a probe": func() (int, http.Header, string) {
			return fetch(t, x.addr+"/v1/models")
		},
	} {
		status, h, response := send()
		assert.Equal(t, http.StatusServiceUnavailable, status, "%s: %s", name, response)
		assert.Equal(t, "1", h.Get("Retry-After"), name)
		assert.Equal(t, "decode_failed", gjson.Get(response, "error.code").String(), name)
		assert.NotContains(t, response, "127.0.0.1", name)
	}
}

// The sidecar calls the decode engine beside it at loopback, even if the request names another one.
func TestTheDecodeEngineIsCalledAtLoopback(t *testing.T) {
	for args, want := range map[string]string{"--data-parallel-size=2": "http://127.0.0.1:8201",
		"--data-parallel-size=2 --enable-tls=decoder": "https://localhost:8201"} {
		f, problem := parse(t, noEnv, append(strings.Fields(args), "--prefillers=p:1")...)
		require.Empty(t, problem)
		s, err := build(f, slog.New(slog.DiscardHandler), &telemetry{})
		require.NoError(t, err)
		s.legs.close()
		assert.Equal(t, want, s.decode[1].URL.String())
	}
}

func TestAFurtherAttemptTakesTheNextOfTheNamed(t *testing.T) {
	p, d := twoEngines(t, enginesim.Config{}, enginesim.Config{})
	dead := "127.0.0.1:" + strconv.Itoa(ports(t, 1)) // which nobody takes meanwhile
	common := []string{"--port=0", "--secure-proxy=false", "--vllm-port=" + portOf(t, d.URL()), "--prefillers=" + dead +
		"," + hostPort(t, p.URL()), "--prefill-retry-backoff=1ms"}
	for retries, want := range map[string]int{"0": http.StatusBadGateway, "1": http.StatusOK} {
		x := start(t, nil, append(common, "--prefill-max-retries="+retries)...)
		status, _, response := complete(t, x.addr, 0, false, header, dead+", "+hostPort(t, p.URL()))
		assert.Equal(t, want, status, "%s retries: %s", retries, response)
	}
}

// If prefill fails, decode does not compute the prompt instead, as in llm-d's sidecar.
func TestAPrefillEngineThatFailsEndsTheRequest(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	at := hostPort(t, p.URL())
	status, _, response := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions",
		`{"model":"nobody","prompt":"x"}`, header, at)
	assert.Equal(t, http.StatusNotFound, status, "its refusal is the client's: %s", response)
	require.NoError(t, p.Close())
	for _, stream := range []bool{false, true} {
		status, _, response = complete(t, x.addr, 0, stream, header, at)
		assert.Equal(t, http.StatusBadGateway, status)
		assert.Equal(t, "prefill_failed", gjson.Get(response, "error.code").String(), response)
	}
	assert.Empty(t, d.Requests())
}

func TestTheListCanBeAFileThatChanges(t *testing.T) {
	p, d := twoEngines(t, enginesim.Config{}, enginesim.Config{})
	list := filepath.Join(t.TempDir(), "prefillers.yaml")
	require.NoError(t, os.WriteFile(list, []byte("endpoints: []\n"), 0o600))
	x := before(t, d.URL(), nil, "--prefillers-file="+list)
	send := func() int {
		return statusOf(complete(t, x.addr, 0, false, header, hostPort(t, p.URL())))
	}
	require.Eventually(t, func() bool { return send() == http.StatusForbidden }, 20*time.Second, 20*time.Millisecond,
		"503 until the list is read")
	require.NoError(t, os.WriteFile(list, []byte("endpoints: [{url: \""+p.URL()+"\", role: prefill}]\n"), 0o600))
	require.Eventually(t, func() bool { return send() == http.StatusOK }, 20*time.Second, 20*time.Millisecond)
}

// The sidecar chooses among transports, so the flow sees a round tripper of its own.
func TestDecodeIsNotSentWhenPrefillCannotBeReached(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{Connector: "sglang"}, enginesim.Config{Connector: "sglang"}, nil,
		"--kv-connector=sglang")
	require.NoError(t, p.Close())
	status, _, response := complete(t, x.addr, 0, false, header, hostPort(t, p.URL()))
	require.Equal(t, http.StatusBadGateway, status, response)
	assert.Zero(t, d.Stats().Requests, "the engine would wait for KV that nobody computes")
}
