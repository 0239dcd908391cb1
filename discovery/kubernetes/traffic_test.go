// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// While requests run, everything happens to pods that can happen. There is a ready pair all the time, so no request may
// fail; and as long as engines leave as Kubernetes has them leave, no attempt either: each request then has one attempt
// only.
func TestNoRequestFailsThatAReadyPairCouldServe(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute")
	}
	f := newFleet(t)
	for _, name := range []string{"p-0", "p-1", "p-2"} {
		f.create(name, "prefill", "a")
	}
	for _, name := range []string{"d-0", "d-1", "d-2"} {
		f.create(name, "decode", "a")
	}
	l := f.load(t)

	l.attempts(1)
	l.step("pods are created and become ready", func() {
		f.create("p-3", "prefill", "a")
		f.create("d-3", "decode", "a")
	})
	l.step("a prefill pod becomes decode", func() { f.label("p-1", "decode", "a") })
	l.step("and prefill again", func() { f.label("p-1", "prefill", "a") })
	l.step("a pair moves to a group of its own", func() {
		f.label("p-1", "prefill", "b")
		f.label("d-1", "decode", "b")
	})
	l.step("and back", func() { f.label("p-1", "prefill", "a"); f.label("d-1", "decode", "a") })
	l.step("pods become unready", func() { f.ready("p-2", false); f.ready("d-2", false) })
	l.step("and ready again", func() { f.ready("p-2", true); f.ready("d-2", true) })
	l.step("pods are deleted and drain", func() { f.drain("p-3"); f.drain("d-3") })
	l.step("pods of their names come, elsewhere", func() {
		f.create("p-3", "prefill", "a")
		f.create("d-3", "decode", "a")
	})
	l.step("pods lose their labels", func() { f.label("p-2", "", ""); f.label("d-2", "", "") })

	l.attempts(2)
	l.streams(false) // what a client has begun to read, nobody can repeat
	l.step("a decode engine dies with its pod", func() { f.kill("d-1") })
	l.step("a prefill engine dies with its pod", func() { f.kill("p-1") })
	l.streams(true)

	l.attempts(1)
	l.step("the API server dies", func() { f.c.KillAPIServer() })
	l.step("is away", func() { time.Sleep(2 * time.Second) })
	l.step("and comes back", func() { f.c.StartAPIServer(t) })
	l.step("pods are created", func() { f.create("p-4", "prefill", "a"); f.create("d-4", "decode", "a") })
	l.step("the first of all are deleted", func() { f.drain("p-0"); f.drain("d-0") })
	l.end()
	for name, e := range f.engines {
		assert.NotZero(t, e.Stats().Requests, "%s has served nothing", name)
	}
}

// fleet is pods with an engine behind each, on the same ports of different loopback addresses.
type fleet struct {
	t       *testing.T
	c       *kubetest.Cluster
	ns      string
	port    string
	side    string // the port of the side channel
	last    int    // byte of an address
	set     *discovery.Set
	engines map[string]*enginesim.Engine // those that serve
	through func()                       // waits for the end of the requests that are under way
}

func newFleet(t *testing.T) *fleet {
	f := &fleet{t: t, c: kubetest.Start(t), last: 10, engines: map[string]*enginesim.Engine{}}
	f.ns = f.c.Namespace(t)
	var err error
	f.port, err = freeport.One()
	require.NoError(t, err)
	f.side, err = freeport.One()
	require.NoError(t, err)

	o := grouped(f.c, f.ns)
	o.Port = f.port
	source, err := New(&o)
	require.NoError(t, err)
	f.set = discovery.NewSet(source)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- f.set.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
		for _, e := range f.engines {
			_ = e.Close()
		}
	})
	return f
}

// await waits until the gateway's set knows of the pod what ok wants; e is nil while it is not listed.
func (f *fleet) await(name string, ok func(e *discovery.Endpoint) bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	require.NoError(f.t, f.set.WaitReady(ctx, func(s *discovery.Snapshot) bool {
		for _, e := range s.Endpoints {
			if e.ID == f.ns+"/"+name {
				return ok(&e)
			}
		}
		return ok(nil)
	}), "%s", name)
}

func (f *fleet) address(name string) string {
	host, _, _ := net.SplitHostPort(strings.TrimPrefix(f.engines[name].URL(), "http://"))
	return host
}

// create starts a pod, then its engine, and then the pod is ready.
func (f *fleet) create(name, role, group string) {
	f.t.Helper()
	f.last++
	ip := fmt.Sprintf("127.0.0.%d", f.last)
	f.c.Pod(f.t, f.ns, name, map[string]string{"app": "llm", "role": role, "group": group}, nil)
	f.c.SetPod(f.t, f.ns, name, ip, false)
	f.await(name, func(e *discovery.Endpoint) bool { return e != nil && e.Phase == discovery.PhaseNotReady })
	e, err := enginesim.Start(enginesim.Config{
		Connector: "nixl", Listen: net.JoinHostPort(ip, f.port), SideChannel: net.JoinHostPort(ip, f.side),
		ITL: time.Millisecond, KeepRequests: -1,
	})
	require.NoError(f.t, err)
	f.engines[name] = e
	f.ready(name, true)
}

func (f *fleet) ready(name string, ready bool) {
	f.t.Helper()
	f.c.SetPod(f.t, f.ns, name, f.address(name), ready)
	f.await(name, func(e *discovery.Endpoint) bool { return e != nil && (e.Phase == discovery.PhaseReady) == ready })
}

func (f *fleet) label(name, role, group string) {
	f.t.Helper()
	f.c.SetLabels(f.t, f.ns, name, map[string]string{"role": role, "group": group})
	f.await(name, func(e *discovery.Endpoint) bool {
		return e == nil && role == "" || e != nil && e.Role.String() == role && e.Group == group
	})
}

// drain deletes a pod as kubectl does: the engine gets SIGTERM after its preStop hook, here when nothing runs any more,
// and then the pod goes.
func (f *fleet) drain(name string) {
	f.t.Helper()
	f.c.DeletePod(f.t, f.ns, name, 30)
	// The hook: the gateway learns of the deletion meanwhile, and who has picked the engine before reaches it.
	f.await(name, func(e *discovery.Endpoint) bool { return e == nil || e.Phase == discovery.PhaseDraining })
	f.through()
	require.NoError(f.t, f.engines[name].WaitIdle(f.t.Context()))
	require.NoError(f.t, f.engines[name].Close())
	f.gone(name)
}

// gone removes the pod of an engine that has ended, as soon as a kubelet would have noticed.
func (f *fleet) gone(name string) {
	f.t.Helper()
	delete(f.engines, name)
	time.Sleep(300 * time.Millisecond)
	f.c.DeletePod(f.t, f.ns, name, 0)
	f.await(name, func(e *discovery.Endpoint) bool { return e == nil })
}

// kill ends an engine in the midst of its work, and removes its pod.
func (f *fleet) kill(name string) {
	f.t.Helper()
	f.engines[name].Kill()
	f.gone(name)
}

// rate is that of requests, where the machine is fast enough; waiting bounds those under way where it is not.
const (
	rate    = 200
	waiting = 100
)

// load is clients of a gateway.
type load struct {
	t      *testing.T
	flows  [3]*pdflow.Flow // by their number of attempts
	flow   atomic.Pointer[pdflow.Flow]
	url    string
	client *http.Client
	texts  map[string]string // by prompt: what one engine alone says

	switching sync.RWMutex // held by a request for reading
	streaming sync.RWMutex // held by a stream for reading
	streamed  bool
	began     time.Time
	stop      chan struct{}
	done      sync.WaitGroup

	mu       sync.Mutex
	now      string // the step
	served   int
	streamsN int
	byMode   map[string]int
	failures []string
	repeated int // attempts that failed and were followed by another
}

func (f *fleet) load(t *testing.T) *load {
	t.Helper()
	l := &load{t: t, stop: make(chan struct{}), streamed: true, byMode: map[string]int{},
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: waiting}}}
	l.learn()
	tr := transport.New(nil)
	conn, err := nixl.New(nil)
	require.NoError(t, err)
	picker := pick.New(f.set, pick.RoundRobin())
	for attempts := 1; attempts < len(l.flows); attempts++ {
		l.flows[attempts], err = pdflow.New(conn, picker, pdflow.WithTransport(tr),
			pdflow.WithObserver(pdflow.Observer{SessionEnd: l.SessionEnd}),
			// The flow has few requests when an engine dies, and all of them may be at that engine.
			pdflow.WithRetry(config.Retry{MaxAttempts: attempts, BackoffBase: time.Millisecond, Budget: 1}))
		require.NoError(t, err)
	}
	l.attempts(1)
	f.through = l.through
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.switching.RLock()
		defer l.switching.RUnlock()
		l.flow.Load().ServeHTTP(w, r)
	}))
	l.url = gateway.URL
	t.Cleanup(func() {
		l.client.CloseIdleConnections()
		gateway.Close()
		tr.Close()
	})
	l.began = time.Now()
	l.done.Go(l.run)
	return l
}

// learn has one engine alone answer all prompts.
func (l *load) learn() {
	e, err := enginesim.Start(enginesim.Config{})
	require.NoError(l.t, err)
	defer e.Close()
	l.url, l.texts = e.URL(), map[string]string{}
	for i := range 16 {
		prompt := fmt.Sprintf("Where does crane number %d stand after the storm?", i)
		_, text, err := l.ask(prompt, false)
		require.NoError(l.t, err)
		l.texts[prompt] = text
	}
	l.client.CloseIdleConnections()
}

func (l *load) run() {
	tick := time.NewTicker(time.Second / rate)
	defer tick.Stop()
	places := make(chan struct{}, waiting)
	for i := 0; ; i++ {
		select {
		case <-l.stop:
			return
		case <-tick.C:
		}
		places <- struct{}{}
		l.done.Go(func() { l.request(i); <-places })
	}
}

func (l *load) request(i int) {
	prompt := fmt.Sprintf("Where does crane number %d stand after the storm?", i%len(l.texts))
	l.streaming.RLock()
	stream := l.streamed && i%2 == 0
	if !stream {
		l.streaming.RUnlock()
	} else {
		defer l.streaming.RUnlock()
	}
	l.mu.Lock()
	step := l.now
	l.mu.Unlock()
	mode, text, err := l.ask(prompt, stream)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err != nil:
		l.failures = append(l.failures, step+": "+err.Error())
	case text != l.texts[prompt]:
		l.failures = append(l.failures, step+": another response than that of one engine")
	default:
		l.served++
		l.byMode[mode]++
		if stream {
			l.streamsN++
		}
	}
}

// ask returns the mode and the text of a response, if it is a whole one.
func (l *load) ask(prompt string, stream bool) (mode, text string, err error) {
	body := fmt.Sprintf(`{"prompt":%q,"max_tokens":8,"stream":%v}`, prompt, stream)
	resp, err := l.client.Post(l.url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return "", "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		line, _ := bufio.NewReader(resp.Body).ReadString('\n')
		return "", "", fmt.Errorf("%d %s", resp.StatusCode, line)
	}
	mode = resp.Header.Get("X-PD-Mode")
	whole := false
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data := strings.TrimPrefix(lines.Text(), "data: ")
		if data == "" || data == "[DONE]" {
			continue
		}
		var part struct {
			Choices []struct {
				Text   string `json:"text"`
				Finish string `json:"finish_reason"`
			} `json:"choices"`
		}
		if err := json.Unmarshal([]byte(data), &part); err != nil {
			return mode, text, fmt.Errorf("%w in %s", err, data)
		}
		for _, c := range part.Choices {
			text += c.Text
			whole = whole || c.Finish == "length"
		}
	}
	if err := lines.Err(); err != nil {
		return mode, text, err
	}
	if !whole {
		return mode, text, fmt.Errorf("the response ends early after %q", text)
	}
	return mode, text, nil
}

// SessionEnd counts the attempts that failed.
func (l *load) SessionEnd(_ context.Context, o *pdflow.Outcome) {
	if o.Err != nil && !o.Final {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.repeated++
	}
}

// attempts bounds those of the requests from now on, and waits for the end of those that have another bound: an engine
// that is killed next must not have a request with one attempt.
func (l *load) attempts(n int) {
	l.switching.Lock()
	defer l.switching.Unlock()
	l.flow.Store(l.flows[n])
}

// through waits for the end of all requests that are under way.
func (l *load) through() {
	l.switching.Lock()
	defer l.switching.Unlock()
}

// streams says whether half of the requests are streams, and waits for the end of those that are.
func (l *load) streams(on bool) {
	l.streaming.Lock()
	defer l.streaming.Unlock()
	l.streamed = on
}

// step lets something happen, and requests go on for a while with it.
func (l *load) step(what string, happen func()) {
	l.t.Helper()
	l.mu.Lock()
	l.now = what
	l.mu.Unlock()
	happen()
	time.Sleep(time.Second)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.t.Logf("%5.1f s, %5d served, %d failed: %s", time.Since(l.began).Seconds(), l.served, len(l.failures), what)
}

// end ends the load, and judges it.
func (l *load) end() {
	took := time.Since(l.began)
	close(l.stop)
	l.done.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, f := range l.flows[1:] {
		assert.NoError(l.t, f.Shutdown(ctx))
	}
	l.t.Logf("%d requests in %v (%.0f/s), %d of them streams, by mode: %v; %d failed; %d attempts at killed engines "+
		"were repeated",
		l.served+len(l.failures), took.Round(time.Second), float64(l.served)/took.Seconds(), l.streamsN, l.byMode,
		len(l.failures), l.repeated)
	assert.Empty(l.t, l.failures)
	assert.Equal(l.t, map[string]int{"disaggregated": l.served}, l.byMode)
	assert.NotZero(l.t, l.streamsN)
}
