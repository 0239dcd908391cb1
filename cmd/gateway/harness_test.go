// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

const asProgram = "PDKIT_TEST_AS_GATEWAY"

// TestMain is the gateway itself where a test starts the test binary as that. Many tests wait for engines that are away
// or for clocks, so more of them run at once than there are processors, unless -parallel says otherwise.
func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	kubetest.Main(documented{m})
}

// command is the gateway as a process of its own, with what main does besides run: real signals and exit codes.
func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	return cmd
}

// startProcess starts such a process, with further variables of the environment and flags, and waits until it serves.
func startProcess(t *testing.T, yaml string, env []string, args ...string) (*program, *exec.Cmd) {
	t.Helper()
	p := prepare(t, yaml)
	cmd := command(t, append([]string{"-config", p.file}, args...)...)
	cmd.Env, cmd.Stderr = append(cmd.Env, env...), p.log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	p.serving()
	return p, cmd
}

// engine is a stand-in for one LLM engine. Its responses say what reached it.
type engine struct {
	*httptest.Server
	models []string
	mu     sync.Mutex
	sick   bool
	seen   []seen
	hold   chan struct{} // closed: let streams end; nil: they end at once
	pace   time.Duration // how long a stream takes besides
}

type seen struct {
	method, path string
	header       http.Header
	body         string
}

func newEngine(t *testing.T, models ...string) *engine {
	t.Helper()
	e := &engine{models: models}
	e.Server = httptest.NewServer(e)
	t.Cleanup(e.Close)
	return e
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	e.mu.Lock()
	sick, hold, pace := e.sick, e.hold, e.pace
	followed := r.URL.Path == modelsPath && r.Header.Get("User-Agent") == "pdkit-inspect"
	if r.URL.Path != "/health" && !followed { // what the gateway asks by itself, again and again
		e.seen = append(e.seen, seen{r.Method, r.URL.Path, r.Header.Clone(), string(body)})
	}
	e.mu.Unlock()
	if sick {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Server", "uvicorn")
	switch {
	case r.URL.Path == "/health":
	case r.URL.Path == "/redirect", r.URL.Path == "/v1/redirect":
		http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusTemporaryRedirect)
	case r.URL.Path == "/v1/hang":
		<-r.Context().Done()
	case r.URL.Path == modelsPath:
		var data []map[string]any
		for _, id := range e.models {
			data = append(data, map[string]any{"id": id, "object": "model"})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"object": "list", "data": data})
	case strings.Contains(string(body), `"stream":true`):
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
		_ = http.NewResponseController(w).Flush()
		time.Sleep(pace)
		if hold != nil {
			select {
			case <-hold:
			case <-r.Context().Done():
				return
			}
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	default:
		_, _ = io.WriteString(w, `{"id":"x","choices":[{"text":"hello"}],"usage":{"prompt_tokens":3}}`)
	}
}

func (e *engine) set(change func(*engine)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(e)
}

// holds keeps the engine's streams from ending until the channel is closed.
func (e *engine) holds() chan struct{} {
	hold := make(chan struct{})
	e.set(func(e *engine) { e.hold = hold })
	return hold
}

func (e *engine) last() seen {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.seen) == 0 {
		return seen{}
	}
	return e.seen[len(e.seen)-1]
}

func (e *engine) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.seen)
}

// serverYAML is a ModelServer with lines of its spec, and with a list of its engines unless the spec finds them in
// another way. An engine is an entry.
func serverYAML(model, spec string, engines ...string) string {
	yaml := fmt.Sprintf("apiVersion: networking.matrixinfer.ai/v1alpha1\nkind: ModelServer\nspec:\n  model: %q\n%s",
		model, spec)
	if len(engines) > 0 {
		yaml += "  discovery:\n    static:\n      endpoints:\n        - " + strings.Join(engines, "\n        - ") + "\n"
	}
	return yaml + "---\n"
}

type attributes = map[string]string

// entry is an engine in a list.
func entry(url, role string, a attributes) string {
	if a == nil {
		a = attributes{}
	}
	var text strings.Builder // JSON, which is YAML, too
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(a); err != nil {
		panic(err) // they are strings
	}
	return fmt.Sprintf("{url: %q, role: %s, attributes: %s}", url, role, strings.TrimSpace(text.String()))
}

// pairYAML is a ModelServer over P and D with the connector http.
func pairYAML(model string, p, d *engine, spec string) string {
	return serverYAML(model, spec, entry(p.URL, "prefill", nil), entry(d.URL, "decode", nil))
}

// startHTTP starts a gateway of a model m over two stand-ins, with further settings of the Gateway, lines of the
// ModelServer's spec, and flags.
func startHTTP(t *testing.T, gateway, spec string, args ...string) (g *program, p, d *engine) {
	t.Helper()
	p, d = newEngine(t, "m"), newEngine(t, "m")
	return start(t, gatewayYAML(gateway)+pairYAML("m", p, d, spec), args...), p, d
}

func gatewayYAML(spec string) string {
	return "apiVersion: pdkit.dev/v1alpha1\nkind: Gateway\nspec: {listen: 127.0.0.1:0, admin: 127.0.0.1:0" + spec +
		"}\n---\n"
}

// program is the gateway at work inside the test.
type program struct {
	t             *testing.T
	file          string // the configuration
	args          []string
	signals       chan os.Signal
	code          chan int
	log           *sharedtest.Log
	client, admin string
}

var servingLine = regexp.MustCompile(`msg=serving listen=(\S+)(?: admin=(\S+))?`)

// start starts the program and waits until it serves. It is ended with the test.
func start(t *testing.T, yaml string, args ...string) *program {
	t.Helper()
	p := prepare(t, yaml, args...)
	p.start()
	return p
}

// prepare writes the program's configuration.
func prepare(t *testing.T, yaml string, args ...string) *program {
	t.Helper()
	return &program{t: t, file: write(t, yaml), args: args, signals: make(chan os.Signal, 2), code: make(chan int, 1),
		log: &sharedtest.Log{}}
}

func (p *program) start() {
	t := p.t
	t.Helper()
	go func() { p.code <- run(append([]string{"-config", p.file}, p.args...), io.Discard, p.log, p.signals) }()
	p.serving()
	t.Cleanup(func() {
		select {
		case code := <-p.code:
			p.code <- code
			return
		default:
		}
		scrape(p.admin)
		p.signal()
		p.signal()
		p.ended(exitOK)
		http.DefaultClient.CloseIdleConnections()
	})
}

// serving waits until the log says at which addresses the program serves.
func (p *program) serving() {
	p.t.Helper()
	require.Eventually(p.t, func() bool {
		m := servingLine.FindStringSubmatch(p.log.String())
		if m != nil {
			p.client, p.admin = "http://"+m[1], "http://"+m[2]
		}
		return m != nil
	}, 20*time.Second, time.Millisecond, "%s", p.log)
}

func (p *program) signal() { p.signals <- syscall.SIGTERM }

// ended waits for the program's end.
func (p *program) ended(code int) {
	p.t.Helper()
	select {
	case got := <-p.code:
		p.code <- got
		assert.Equal(p.t, code, got, "%s", p.log)
	case <-time.After(10 * time.Second):
		require.Fail(p.t, "the program does not end", "%s", p.log)
	}
}

// complete sends the body of a completion.
func (p *program) complete(body string, header ...string) (status int, h http.Header, response string) {
	p.t.Helper()
	return do(p.t, http.MethodPost, p.client+"/v1/completions", body, header...)
}

// page returns a page of the operators' side.
func (p *program) page(path string) string {
	p.t.Helper()
	_, _, body := do(p.t, http.MethodGet, p.admin+path, "")
	return body
}

// ready returns the status of /readyz, and what it says.
func (p *program) ready() (status int, body string) {
	p.t.Helper()
	status, _, body = do(p.t, http.MethodGet, p.admin+"/readyz", "")
	return status, body
}

// becomes waits until the status of /readyz is so.
func (p *program) becomes(status int) {
	p.t.Helper()
	eventually(p.t, func() bool { got, _ := p.ready(); return got == status })
}

// shows waits until the page of metrics has a text.
func (p *program) shows(metric string) {
	p.t.Helper()
	eventually(p.t, func() bool { return strings.Contains(p.page("/metrics"), metric) }, metric)
}

// eventually waits as long as the busiest machine needs.
func eventually(t *testing.T, condition func() bool, says ...any) {
	t.Helper()
	require.Eventually(t, condition, 30*time.Second, 5*time.Millisecond, says...)
}

// do sends one request on a connection of its own.
func do(t *testing.T, method, url, body string, header ...string) (status int, h http.Header, response string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Close = true
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, resp.Header, string(b)
}

// isFree waits until nobody listens at an address.
func isFree(t *testing.T, addr string, says ...any) {
	t.Helper()
	eventually(t, func() bool {
		ln, err := net.Listen("tcp", addr)
		return err == nil && ln.Close() == nil
	}, says...)
}
