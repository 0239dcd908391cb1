// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

// The file lies behind two symbolic links, as in a Kubernetes ConfigMap, of which ..data is swapped. Then the folder
// behind it vanishes, comes back empty, and becomes one where the file is a folder: none of that changes anything.
func TestAConfigMapIsFollowed(t *testing.T) {
	e, d := newEngine(t), newEngine(t)
	one := gatewayYAML("") + pairYAML("m", e, d, "")
	p := prepare(t, one)
	dir := filepath.Join(t.TempDir(), "map")
	version := 0
	swap := func(fill func(path string)) {
		version++
		name := fmt.Sprint("..", version)
		require.NoError(t, os.MkdirAll(filepath.Join(dir, name), 0o700))
		fill(filepath.Join(dir, name, "config.yaml"))
		require.NoError(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
		require.NoError(t, os.RemoveAll(filepath.Join(dir, fmt.Sprint("..", version-1))))
	}
	holds := func(text string) func(string) {
		return func(path string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }
	}
	swap(holds(one))
	p.file = filepath.Join(dir, "config.yaml")
	require.NoError(t, os.Symlink(filepath.Join("..data", "config.yaml"), p.file))
	p.start()
	models := func(want int) {
		t.Helper()
		eventually(t, func() bool { return len(p.debug().Models) == want }, "%s", p.log)
	}
	swap(holds(one + pairYAML("n", e, d, "")))
	models(2)
	swap(holds(one))
	models(1)
	for why, fill := range map[string]func(string){
		"no such file":       func(string) {},
		"has no ModelServer": holds(""),
		"is not a file":      func(path string) { require.NoError(t, os.Mkdir(path, 0o700)) },
	} {
		swap(fill)
		require.Eventually(t, func() bool { return strings.Contains(p.debug().Configuration.Error, why) },
			30*time.Second, 10*time.Millisecond, "%s: %+v", why, p.debug().Configuration)
		assert.Len(t, p.debug().Models, 1)
		status, _, body := p.complete(completion)
		assert.Equal(t, http.StatusOK, status, body)
	}
	swap(holds(one + pairYAML("n", e, d, "")))
	models(2)
	eventually(t, func() bool { return p.debug().Configuration.Error == "" })
}

// Twice 50 SIGHUPs, most of them with another file, while 200 requests a second run: none is lost, and afterwards the
// process holds no more goroutines, file descriptors and models than before.
func TestManyReloadsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	e, d := newEngine(t), newEngine(t)
	d.set(func(d *engine) { d.pace = 50 * time.Millisecond })
	config := func(round int) string { // another pool in each second round, another flow in each
		return gatewayYAML("") + pairYAML("m", e, d, fmt.Sprintf("  kvConnector: {type: http, "+
			"retry: {maxAttempts: %d}, timeouts: {connect: %ds, healthCheck: 30s}}\n", 2+round%3, 30+round/2%2))
	}
	p, process := startProcess(t, config(0), nil, "-pprof")
	clients := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}
	tr := sendBy(t, clients, p.client+"/v1/completions", func(n int64) string {
		return fmt.Sprintf(`{"model":"m","prompt":"x","stream":%t}`, n%2 == 0)
	}, 200)
	reload := func(round int) {
		p.configure(config(round))
		require.NoError(t, process.Process.Signal(syscall.SIGHUP))
	}
	open := func() int {
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", process.Process.Pid))
		require.NoError(t, err)
		return len(list)
	}
	stacks := func() string {
		page := p.page("/debug/pprof/goroutine?debug=1")
		return page
	}
	running := func() (n int) {
		_, err := fmt.Sscanf(stacks(), "goroutine profile: total %d", &n)
		require.NoError(t, err)
		return n
	}
	storm := func() {
		for round := range 50 {
			reload(round)
			time.Sleep(10 * time.Millisecond)
		}
		reload(0)
		time.Sleep(time.Second)
	}
	// settle brings a pool that carries no traffic, and closes the clients' connections: how many idle ones are kept
	// depends on the machine.
	settle := func() {
		clients.CloseIdleConnections()
		reload(2)
		time.Sleep(2 * afterlife)
	}
	storm()
	tr.stop()
	tr.done.Wait()
	settle()
	goroutines, files := running(), open()
	again := sendBy(t, clients, p.client+"/v1/completions", func(int64) string { return completion }, 200)
	storm()
	assert.Empty(t, append(tr.end(), again.end()...), "of %d\n%s", tr.sent.Load()+again.sent.Load(), p.log)
	settle()
	if !assert.Eventually(t, func() bool { return running() <= goroutines+20 && open() <= files+20 },
		30*time.Second, 50*time.Millisecond) {
		t.Fatalf("goroutines %d, were %d; files %d, were %d\n%.6000s", running(), goroutines, open(), files, stacks())
	}
	assert.Eventually(t, func() bool { // a reload may still be under way
		log := p.log.String()
		ended := strings.Count(log, `msg="a ModelServer ends"`)
		served := strings.Count(log, `msg="a ModelServer is served"`)
		return ended > 0 && ended >= served-1 // and those that were replaced before they served
	}, 20*time.Second, 10*time.Millisecond, "%s", p.log)
}

// A reload takes a model away while its streams run. They go on to their end; new requests are told that the model is
// not there.
func TestAModelThatIsTakenAwayEndsItsStreams(t *testing.T) {
	t.Parallel()
	e, d := newEngine(t), newEngine(t)
	hold := d.holds()
	p := start(t, gatewayYAML("")+pairYAML("m", e, d, "")+pairYAML("n", e, d, ""))
	var streams []*stream
	for range 10 {
		streams = append(streams, openStream(t, p))
	}
	p.configure(gatewayYAML("") + pairYAML("n", e, d, ""))
	p.logs(1, `msg="a ModelServer ends"`)
	status, _, _ := p.complete(completion)
	assert.Equal(t, http.StatusNotFound, status)
	time.Sleep(2 * afterlife)
	close(hold)
	for _, s := range streams {
		assert.Equal(t, "data: [DONE]", s.rest(t))
	}
}

// Limits of admission that a reload brought together with a fault in another model, and that come again without it,
// are new ones: those of the failed reload have ended, their metrics with them. The limits that serve meanwhile keep
// what they count.
func TestARefusedReloadLeavesAdmissionAsItWas(t *testing.T) {
	e, d := newEngine(t), newEngine(t)
	hold := d.holds()
	config := func(most, attempts int) string {
		return gatewayYAML("") + pairYAML("m", e, d, retries(attempts)+
			fmt.Sprintf("  admission: {mode: fixed, inFlightPerDecode: %d, queue: 0}\n", most))
	}
	p := start(t, config(1, 2))
	s := openStream(t, p)
	p.configure(config(2, 2) + pairYAML("n", e, d, "  kvConnector: {type: ascend-layerwise, config: "+
		"{callbackListen: \""+busy(t)+"\"}}\n"))
	p.logs(1, refusedLine)
	p.configure(config(1, 3)) // the limits that serve
	p.logs(1, reloadedLine)
	status, _, body := p.complete(completion)
	assert.Equal(t, http.StatusServiceUnavailable, status, "the stream still counts: %s", body)
	p.configure(config(2, 3)) // those of the refused file
	p.logs(2, reloadedLine)
	p.logs(3, `msg="a ModelServer is served"`)
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
	p.logs(2, `msg="a ModelServer ends"`)
	p.shows(`pd_admission_queued{gen_ai_request_model="m"} 0`)
}

// A client that leaves while its request waits gives back its place in the queue and its bytes, and nothing was sent
// for it.
func TestAClientMayLeaveWhileQueued(t *testing.T) {
	e, d := newEngine(t), newEngine(t)
	hold := d.holds()
	p := start(t, gatewayYAML("")+pairYAML("m", e, d,
		"  admission: {mode: fixed, inFlightPerDecode: 1, queue: 8, queueTimeout: 60s}\n"))
	s := openStream(t, p)
	ctx, leave := context.WithCancel(t.Context())
	for range 8 {
		go liveRequest(ctx, p, completion)
	}
	p.shows(`pd_admission_queued{gen_ai_request_model="m"} 8`)
	leave()
	p.shows(`pd_admission_queued{gen_ai_request_model="m"} 0`)
	assert.Equal(t, 1, e.count())
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
	p.shows("\npd_bytes_in_flight 0\n")
	status, _, body := p.complete(completion)
	assert.Equal(t, http.StatusOK, status, body)
}

// Files that are spoilt when the configuration is read again open the gateway to nobody: a certificate with another
// one's key, no authorities of clients, and a token file without a token.
func TestSpoiltFilesOpenNothing(t *testing.T) {
	e, d := newEngine(t), newEngine(t)
	p := prepare(t, "", "-log-level", "debug")
	dir := filepath.Dir(p.file)
	own, others := sharedtest.NewAuthority(t, "own"), sharedtest.NewAuthority(t, "others")
	issue(t, own, dir, "gateway")
	issue(t, own, dir, "other")
	issue(t, own, dir, "client")
	issue(t, others, dir, "stranger")
	config := func(certificate, ca string, attempts int) string {
		return gatewayYAML(fmt.Sprintf(", registrationTokenFile: token, tls: {certFile: %s.pem, "+
			"keyFile: gateway-key.pem, clientCAFile: %s}", certificate, ca)) + pairYAML("n", e, d, retries(attempts)) +
			announcing("m", "http", "http: 127.0.0.1:0")
	}
	lists(t, filepath.Join(dir, "ca.PEM"), string(own.PEM))
	lists(t, filepath.Join(dir, "empty.pem"), "")
	lists(t, filepath.Join(dir, "token"), "first-secret\n")
	lists(t, p.file, config("gateway", "ca.PEM", 2))
	p.start()
	url := strings.Replace(p.client, "http:", "https:", 1) + "/v1/completions"
	asks := func(name string) error {
		pair, err := tls.LoadX509KeyPair(filepath.Join(dir, name+".pem"), filepath.Join(dir, name+"-key.pem"))
		require.NoError(t, err)
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
			RootCAs: own.Pool(), Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}}}
		resp, err := client.Post(url, "application/json", strings.NewReader(`{"model":"n","prompt":"x"}`))
		if err != nil {
			return err
		}
		assert.Equal(t, http.StatusOK, resp.StatusCode)
		return resp.Body.Close()
	}
	api := p.api()
	registers := func(authorization string) int {
		status, _, _ := do(t, http.MethodGet, api, "", "Authorization", authorization)
		return status
	}
	for i, bad := range []string{config("other", "ca.PEM", 3), config("gateway", "empty.pem", 3)} {
		p.configure(bad)
		p.logs(i+1, refusedLine)
		require.NoError(t, asks("client"))
		require.Error(t, asks("stranger"))
	}
	lists(t, filepath.Join(dir, "token"), "")
	lists(t, filepath.Join(dir, "ca.PEM"), "")
	p.configure(config("gateway", "ca.PEM", 4)) // ca.PEM has nobody any more
	p.logs(3, refusedLine)
	require.NoError(t, asks("client"))
	require.Error(t, asks("stranger"))
	assert.Equal(t, http.StatusUnauthorized, registers(""))
	assert.Equal(t, http.StatusUnauthorized, registers("Bearer "))
	assert.Equal(t, http.StatusOK, registers("Bearer first-secret"))
	assert.NotContains(t, p.log.String(), "first-secret")
	assert.NotContains(t, p.log.String(), "PRIVATE KEY")
}

// Prompts, keys, tokens and passwords are in no log line, metric, debug page or error, before and after reloads.
func TestAReloadTellsNoSecret(t *testing.T) {
	e, d := newEngine(t), newEngine(t)
	config := func(more string) string {
		return gatewayYAML(", passthrough: decode, registrationTokenFile: token") + pairYAML("m", e, d, more)
	}
	p := prepare(t, config(""), "-log-level", "debug")
	lists(t, filepath.Join(filepath.Dir(p.file), "token"), "token-hunter2\n")
	p.start()
	var told strings.Builder
	use := func() {
		for _, body := range []string{
			`{"model":"m","prompt":"prompt-hunter2"}`,
			`{"model":"m","prompt":"prompt-hunter2"`,
			`{"model":"model-hunter2","prompt":"prompt-hunter2"}`,
			`{"model":"m","prompt":"prompt-hunter2","stream":true}`,
		} {
			for _, path := range []string{"/v1/completions", "/v1/embeddings"} {
				_, _, response := do(t, http.MethodPost, p.client+path, body, "Authorization", "Bearer key-hunter2",
					"X-Api-Key", "key-hunter2")
				if !strings.Contains(body, "model-hunter2") {
					told.WriteString(response)
				}
			}
		}
		for _, path := range []string{"/debug/pd", "/metrics", "/readyz"} {
			_, _, text := do(t, http.MethodGet, p.admin+path, "", "Authorization", "Bearer key-hunter2")
			told.WriteString(text)
		}
	}
	use()
	good := config("")
	for i, bad := range []string{
		strings.Replace(good, "http://", "http://user:password-hunter2@", 1),
		strings.Replace(good, "http://", "http://%zzpassword-hunter2@", 1),
		strings.Replace(good, "  model: ", "  apiKey: password-hunter2\n  model: ", 1),
		strings.Replace(good, "  model: ",
			"  kvConnector: {type: nixl, config: {leaseDuration: password-hunter2}}\n  model: ", 1),
		good + "password-hunter2: [\n",
		good + "password-hunter2\n",
		good + "\"password-hunter2\n",
	} {
		p.configure(bad)
		p.logs(i+1, refusedLine)
		use()
	}
	p.configure(config(retries(4)))
	p.logs(1, reloadedLine)
	use()
	assert.NotContains(t, p.log.String()+told.String(), "hunter2")
}

// While the gateway drains, and after a reload has taken attestation away, no probe is sent.
func TestNoProbeIsSentInADrain(t *testing.T) {
	t.Parallel()
	all := enginesim.Config{KeepRequests: 1 << 20}
	p, d := simPair(t, all, all)
	p2, d2 := simPair(t, all, all)
	plain := gatewayYAML("") + simYAML("", p, d, p2, d2)
	probing := gatewayYAML("") + simYAML(attesting("quarantine", "1ms"), p, d, p2, d2)
	g := start(t, probing)
	quiet := func() { // once a probe that has begun is over
		t.Helper()
		assert.Eventually(t, func() bool {
			before := len(d.Requests()) + len(d2.Requests())
			time.Sleep(300 * time.Millisecond)
			return before == len(d.Requests())+len(d2.Requests())
		}, 20*time.Second, time.Millisecond)
	}
	eventually(t, func() bool { return len(d.Requests()) > 5 })
	g.configure(plain)
	g.logs(1, `msg="a ModelServer ends"`)
	quiet()
	g.configure(probing)
	g.logs(2, `msg="a ModelServer ends"`)
	more := len(d.Requests()) + 5
	eventually(t, func() bool { return len(d.Requests()) > more })
	for _, e := range []*enginesim.Engine{p, p2} {
		e.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 2 * time.Second, Leg: enginesim.LegPrefill,
			Count: -1})
	}
	sent := make(chan int)
	go func() {
		status, _, _ := g.complete(`{"model":"tiny","prompt":"x","max_tokens":2}`, "X-Request-Id", "asked")
		sent <- status
	}()
	eventually(t, func() bool {
		s, _ := g.live()
		return slices.ContainsFunc(s.Requests, func(r timeline) bool { return r.RequestID == "asked" })
	})
	g.signal()
	g.logs(1, "msg=draining")
	quiet()
	assert.Equal(t, http.StatusOK, <-sent)
	g.ended(exitOK)
}
