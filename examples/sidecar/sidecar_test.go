// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const header = "x-prefiller-host-port" // as llm-d's scheduler writes it

type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// program is the sidecar at work inside the test.
type program struct {
	addr string // host:port
	log  *logBuffer
	stop func() int
}

var servingLine = regexp.MustCompile(`msg=serving listen=\S*:(\d+)`)

func start(t *testing.T, env map[string]string, args ...string) *program {
	t.Helper()
	p := &program{log: &logBuffer{}}
	ctx, cancel := context.WithCancel(context.Background())
	code := make(chan int, 1)
	go func() { code <- run(ctx, args, func(name string) string { return env[name] }, p.log) }()
	p.stop = sync.OnceValue(func() int { cancel(); return <-code })
	t.Cleanup(func() { assert.Equal(t, exitOK, p.stop(), "%s", p.log); http.DefaultClient.CloseIdleConnections() })
	require.Eventually(t, func() bool {
		m := servingLine.FindStringSubmatch(p.log.String())
		if m != nil {
			p.addr = "127.0.0.1:" + m[1]
		}
		return m != nil
	}, 5*time.Second, time.Millisecond, "%s", p.log)
	return p
}

// pair starts engines, and a sidecar before the decode engine that knows the prefill engine.
func pair(t *testing.T, prefill, decode enginesim.Config, env map[string]string, args ...string) (p, d *enginesim.Engine, side *program) {
	t.Helper()
	p, d, err := enginesim.Pair(prefill, decode)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	return p, d, start(t, env, append([]string{"--port=0", "--secure-proxy=false", "--vllm-port=" + portOf(t, d.URL()), "--prefillers=" + hostPort(t, p.URL())}, args...)...)
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

func ask(t *testing.T, client *http.Client, method, url, body string, headers ...string) (status int, h http.Header, answer string) {
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

// prompt is 400 bytes, which are 400 tokens of the toy model: more than a chunk of LMCache.
var prompt = strings.Repeat("a cat on a mat that ", 20)

func completion(n int, stream bool) string {
	return fmt.Sprintf(`{"model":"tiny","prompt":"%d %s","max_tokens":12,"temperature":0,"stream":%t}`, n, prompt, stream)
}

// text joins the text of an answer, whole or streamed.
func text(answer string) string {
	var b strings.Builder
	for line := range strings.Lines(answer) {
		b.WriteString(gjson.Get(strings.TrimPrefix(line, "data: "), "choices.0.text").String())
	}
	return b.String()
}

// Each name that llm-d's sidecars have for a protocol: the header brings the request to both engines, decode takes over what prefill
// has computed, and the text is that of one engine alone.
func TestARequestWithTheHeaderIsServedByBothEngines(t *testing.T) {
	store := func(t *testing.T, name string) enginesim.Config {
		return enginesim.Config{Connector: name, KVRole: enginesim.RoleBoth, Extra: map[string]string{"store": t.TempDir(), "hash_seed": "0", "shared_storage_path": t.TempDir()}}
	}
	bootstrap := func(t *testing.T, p *enginesim.Engine) string { return portOf(t, p.Bootstrap()) }
	side := func(t *testing.T, p *enginesim.Engine) string { return portOf(t, "tcp://"+p.SideChannel()) }
	for name, c := range map[string]struct {
		connector string // of the engines
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
		"sglang":         {connector: "sglang", flag: "--kv-connector=sglang", port: bootstrap, portEnv: "SGLANG_BOOTSTRAP_PORT"},
		"mooncake":       {connector: "mooncake", flag: "--kv-connector=mooncake", port: bootstrap, portFlag: "--mooncake-bootstrap-port="},
		"mooncake, env":  {connector: "mooncake", flag: "--kv-connector=mooncake", port: bootstrap, portEnv: "MOONCAKE_BOOTSTRAP_PORT"},
		"offloading":     {connector: "offload-p2p", flag: "--kv-connector=offloading", port: side, portFlag: "--p2p-connector-port="},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := enginesim.Config{Connector: c.connector}
			if c.connector == "lmcache" || c.connector == "sharedstorage" {
				config = store(t, c.connector)
			}
			p, d, err := enginesim.Pair(config, config)
			require.NoError(t, err)
			alone, err := enginesim.Start(enginesim.Config{})
			require.NoError(t, err)
			t.Cleanup(func() { _ = p.Close(); _ = d.Close(); _ = alone.Close() })
			env := map[string]string{}
			args := []string{"--port=0", "--secure-proxy=false", "--model-server-port=" + portOf(t, d.URL()), "--prefillers=" + hostPort(t, p.URL()), c.flag}
			if c.portFlag != "" {
				args = append(args, c.portFlag+c.port(t, p))
			}
			if c.portEnv != "" {
				env[c.portEnv] = c.port(t, p)
			}
			x := start(t, env, args...)
			for n, stream := range []bool{false, true} {
				body := completion(n, stream)
				status, h, answer := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions", body, header, hostPort(t, p.URL()))
				require.Equal(t, http.StatusOK, status, "%s\n%s", answer, x.log)
				assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"))
				_, _, want := ask(t, http.DefaultClient, http.MethodPost, alone.URL()+"/v1/completions", body)
				require.NotEmpty(t, text(answer))
				assert.Equal(t, text(want), text(answer))
			}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			require.NoError(t, p.WaitIdle(ctx))
			require.NoError(t, d.WaitIdle(ctx))
			assert.NoError(t, p.CheckKV())
			assert.NoError(t, d.CheckKV())
			assert.Positive(t, d.Stats().ExternalKVTransfer, "decode computed the prompts itself")
		})
	}
}

func TestAHeaderThatNamesWhatIsNotListedIsRefused(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	for name, value := range map[string]string{
		"another host":                    "169.254.169.254:80",
		"another port of a listed host":   "127.0.0.1:1",
		"the decode engine itself":        hostPort(t, d.URL()),
		"a listed one and one that isn't": hostPort(t, p.URL()) + ",10.0.0.1:8000",
		"nonsense":                        "http://a@b",
	} {
		status, _, answer := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions", completion(0, false), header, value)
		assert.Equal(t, http.StatusBadRequest, status, name)
		assert.Equal(t, "X-Prefiller-Host-Port", gjson.Get(answer, "error.param").String(), answer)
		assert.NotContains(t, answer, "127.0.0.1", "the answer tells of addresses")
	}
	assert.Empty(t, p.Requests())
	assert.Empty(t, d.Requests())
	assert.NotContains(t, x.log.String(), "169.254.169.254")
}

func TestWithoutTheHeaderTheDecodeEngineServesAlone(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	status, h, answer := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions", completion(0, false))
	require.Equal(t, http.StatusOK, status, answer)
	assert.Equal(t, "aggregated", h.Get("X-Pd-Mode"))
	assert.Empty(t, p.Requests())
	assert.Len(t, d.Requests(), 1)
}

func TestOtherPathsGoToTheEngineBesideIt(t *testing.T) {
	p, _, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	for path, part := range map[string]string{"/v1/models": `"tiny"`, "/version": `"version"`, "/metrics": "vllm:kv_cache_usage_perc"} {
		status, _, answer := ask(t, http.DefaultClient, http.MethodGet, "http://"+x.addr+path, "", header, hostPort(t, p.URL()))
		assert.Equal(t, http.StatusOK, status, path)
		assert.Contains(t, answer, part)
	}
	status, _, _ := ask(t, http.DefaultClient, http.MethodGet, "http://"+x.addr+"/nowhere", "")
	assert.Equal(t, http.StatusNotFound, status)
	assert.Empty(t, p.Requests())
}

func TestWhatPassesIsTheClientsRequestWithoutTheHeader(t *testing.T) {
	got := make(chan *http.Request, 1)
	engine := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r }))
	defer engine.Close()
	x := start(t, nil, "--port=0", "--secure-proxy=false", "--vllm-port="+portOf(t, engine.URL), "--prefillers=p:1")
	status, _, _ := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/tokenize?a=b", `{"prompt":"x"}`, header, "p:1", "Authorization", "Bearer k")
	require.Equal(t, http.StatusOK, status)
	r := <-got
	assert.Equal(t, "POST /tokenize?a=b", r.Method+" "+r.URL.String())
	assert.Equal(t, "Bearer k", r.Header.Get("Authorization"))
	assert.Empty(t, r.Header.Values(header))
}

func TestHealthIsTheSidecarsOwn(t *testing.T) {
	_, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	require.NoError(t, d.Close())
	status, _, _ := ask(t, http.DefaultClient, http.MethodGet, "http://"+x.addr+"/health", "")
	assert.Equal(t, http.StatusOK, status, "llm-d's answers without asking the engine")
	status, _, answer := ask(t, http.DefaultClient, http.MethodGet, "http://"+x.addr+"/v1/models", "")
	assert.Equal(t, http.StatusBadGateway, status)
	assert.NotContains(t, answer, "127.0.0.1")
}

func TestAFurtherAttemptTakesTheNextOfTheNamed(t *testing.T) {
	p, d, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	require.NoError(t, err)
	gone, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	dead := hostPort(t, gone.URL())
	require.NoError(t, gone.Close())
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	common := []string{"--port=0", "--secure-proxy=false", "--vllm-port=" + portOf(t, d.URL()), "--prefillers=" + dead + "," + hostPort(t, p.URL()), "--prefill-retry-backoff=1ms"}
	for retries, want := range map[string]int{"0": http.StatusBadGateway, "1": http.StatusOK} {
		x := start(t, nil, append(common, "--prefill-max-retries="+retries)...)
		status, _, answer := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions", completion(0, false), header, dead+", "+hostPort(t, p.URL()))
		assert.Equal(t, want, status, "%s retries: %s", retries, answer)
	}
}

func TestTheListCanBeAFileThatChanges(t *testing.T) {
	p, d, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	list := filepath.Join(t.TempDir(), "prefillers.yaml")
	require.NoError(t, os.WriteFile(list, []byte("endpoints: []\n"), 0o600))
	x := start(t, nil, "--port=0", "--secure-proxy=false", "--vllm-port="+portOf(t, d.URL()), "--prefillers-file="+list)
	send := func() int {
		status, _, _ := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions", completion(0, false), header, hostPort(t, p.URL()))
		return status
	}
	require.Equal(t, http.StatusBadRequest, send())
	require.NoError(t, os.WriteFile(list, []byte("endpoints: [{url: \""+p.URL()+"\", role: prefill}]\n"), 0o600))
	require.Eventually(t, func() bool { return send() == http.StatusOK }, 10*time.Second, 20*time.Millisecond)
}

func TestADrainLetsStreamsEnd(t *testing.T) {
	p, _, x := pair(t, enginesim.Config{}, enginesim.Config{ITL: 20 * time.Millisecond}, nil)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+x.addr+"/v1/completions", strings.NewReader(completion(0, true)))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(header, hostPort(t, p.URL()))
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	code := make(chan int)
	go func() { code <- x.stop() }()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Contains(t, string(body), "[DONE]")
	assert.Equal(t, exitOK, <-code)
}
