// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// configure writes the program's configuration anew, by renaming.
func (p *program) configure(yaml string) {
	p.t.Helper()
	lists(p.t, p.file, yaml)
}

// logs waits until the log has a text n times.
func (p *program) logs(n int, text string) {
	p.t.Helper()
	require.Eventually(p.t, func() bool { return strings.Count(p.log.String(), text) >= n }, time.Minute,
		2*time.Millisecond, "%s in\n%s", text, p.log)
}

const (
	reloadedLine = `msg="the configuration is reloaded"`
	refusedLine  = `msg="the configuration is not reloaded, and nothing has changed"`
)

// debugged is what /debug/pd says.
type debugged struct {
	Configuration reloaded
	Models        []struct {
		Model, Connector string
		Endpoints        []struct{ ID, URL string }
		Sessions         []json.RawMessage
	}
}

func (p *program) debug() (d debugged) {
	p.t.Helper()
	body := p.page("/debug/pd")
	require.NoError(p.t, json.Unmarshal([]byte(body), &d), body)
	return d
}

// traffic sends requests at a steady rate, each in time, however long the others take.
type traffic struct {
	stop   context.CancelFunc
	done   sync.WaitGroup
	sent   atomic.Int64
	mu     sync.Mutex
	open   map[int64]bool // requests without their response
	failed []string
}

// answered waits until the requests that were sent so far have their responses.
func (tr *traffic) answered(t *testing.T) {
	t.Helper()
	last := tr.sent.Load()
	require.Eventually(t, func() bool {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		for n := range tr.open {
			if n <= last {
				return false
			}
		}
		return true
	}, time.Minute, time.Millisecond)
}

func send(t *testing.T, url string, body func(n int64) string, perSecond int) *traffic {
	t.Helper()
	return sendBy(t, &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}, url, body, perSecond)
}

func sendBy(t *testing.T, client *http.Client, url string, body func(n int64) string, perSecond int) *traffic {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	tr := &traffic{stop: stop, open: map[int64]bool{}}
	tr.done.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(perSecond))
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			tr.mu.Lock()
			n := tr.sent.Add(1)
			tr.open[n] = true
			tr.mu.Unlock()
			tr.done.Go(func() {
				fault := ask(client, url, body(n), fmt.Sprint("r", n))
				tr.mu.Lock()
				defer tr.mu.Unlock()
				delete(tr.open, n)
				if fault != "" {
					tr.failed = append(tr.failed, fault)
				}
			})
		}
	})
	t.Cleanup(func() {
		stop()
		tr.done.Wait()
		client.CloseIdleConnections()
	})
	return tr
}

// ask sends one request and returns what is wrong with the response.
func ask(client *http.Client, url, body, id string) string {
	req, err := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return err.Error()
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	resp, err := client.Do(req)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err.Error()
	case resp.StatusCode != http.StatusOK:
		return fmt.Sprint(resp.StatusCode, " ", string(text))
	case strings.Contains(body, `"stream":true`) && !strings.HasSuffix(string(text), "data: [DONE]\n\n"):
		return "a stream without its end"
	}
	return ""
}

// end stops sending, waits for all responses and returns what failed.
func (tr *traffic) end() []string {
	tr.stop()
	tr.done.Wait()
	return tr.failed
}

func retries(n int) string {
	return fmt.Sprintf("  kvConnector: {type: http, retry: {maxAttempts: %d}, "+
		"timeouts: {connect: 30s, healthCheck: 30s}}\n", n) // a busy machine is no fault
}

// The program, as a process of its own, reads its configuration again on SIGHUP, ten times while 200 requests a second
// run, half of them streams of a second, which outlive several reloads. Before, SIGHUP ended the process with all
// requests in flight.
func TestAReloadLosesNoRequest(t *testing.T) {
	t.Parallel()
	e, d1, d2 := newEngine(t), newEngine(t), newEngine(t)
	for _, d := range []*engine{d1, d2} {
		d.set(func(d *engine) { d.pace = time.Second })
	}
	config := func(round int) string {
		d := d1
		if round%4 >= 2 {
			d = d2
		}
		return gatewayYAML("") + pairYAML("m", e, d, retries(2+round%3))
	}
	p, cmd := startProcess(t, config(0), nil)
	tr := send(t, p.client+"/v1/completions", func(n int64) string {
		return fmt.Sprintf(`{"model":"m","prompt":"x","stream":%t}`, n%2 == 0)
	}, 200)
	for round := 1; round <= 10; round++ {
		require.NoError(t, os.WriteFile(p.file, []byte(config(round)), 0o600)) // the watch may read it first
		require.NoError(t, cmd.Process.Signal(syscall.SIGHUP))
		p.logs(round, reloadedLine)
		time.Sleep(250 * time.Millisecond)
	}
	failed := tr.end()
	assert.Empty(t, failed, "of %d\n%s", tr.sent.Load(), p.log)
	t.Logf("%d requests over 10 reloads, %d failed", tr.sent.Load(), len(failed))
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), "exit code 0 after a drain")
	assert.Positive(t, d1.count())
	assert.Positive(t, d2.count())
}

func TestAChangedFileIsServed(t *testing.T) {
	p, e, d := startHTTP(t, "", "")
	first := p.debug()
	p.configure(gatewayYAML("") + pairYAML("m", e, d, "") + pairYAML("n", e, d, ""))
	p.logs(1, reloadedLine)
	second := p.debug()
	assert.Len(t, second.Models, 2)
	assert.True(t, second.Configuration.LoadedAt.After(first.Configuration.LoadedAt))
	for _, model := range []string{"m", "n"} {
		status, _, body := p.complete(`{"model":"` + model + `","prompt":"x"}`)
		assert.Equal(t, http.StatusOK, status, body)
	}
	p.configure(gatewayYAML("") + pairYAML("n", e, d, ""))
	p.logs(2, reloadedLine)
	status, _, _ := p.complete(`{"model":"m","prompt":"x"}`)
	assert.Equal(t, http.StatusNotFound, status)
}

// A bad file changes nothing, and the log and /debug/pd say why.
func TestABadFileChangesNothing(t *testing.T) {
	e, d := newEngine(t), newEngine(t)
	good := gatewayYAML("") + pairYAML("m", e, d, "")
	p := start(t, good)
	loaded := p.debug().Configuration.LoadedAt
	for i, bad := range []struct{ yaml, why string }{
		{strings.Replace(good, "  model:", "  moedl:", 1), `spec.moedl: unknown field; did you mean model?`},
		{gatewayYAML(""), "has no ModelServer"},
		{good[:len(good)/2] + "\t{", "config.yaml:"},
		// right in form, and not to be started: somebody else listens there
		{gatewayYAML("") + pairYAML("n", e, d, "") + pairYAML("m", e, d, "  kvConnector: {type: ascend-layerwise, "+
			"config: {callbackListen: \""+busy(t)+"\"}}\n"),
			"address already in use"},
	} {
		p.configure(bad.yaml)
		p.logs(i+1, refusedLine)
		require.Eventually(t, func() bool { return strings.Contains(p.debug().Configuration.Error, bad.why) },
			20*time.Second, 5*time.Millisecond, "%s: %+v", bad.why, p.debug().Configuration)
		assert.Contains(t, p.log.String(), filepath.Base(p.file)+":", "the log names file and line")
		assert.Equal(t, loaded, p.debug().Configuration.LoadedAt)
		assert.Len(t, p.debug().Models, 1)
		status, _, body := p.complete(completion)
		assert.Equal(t, http.StatusOK, status, body)
	}
	require.NoError(t, os.Remove(p.file))
	require.Eventually(t, func() bool { return strings.Contains(p.debug().Configuration.Error, "no such file") },
		30*time.Second, 10*time.Millisecond)
	p.configure(good)
	p.logs(1, reloadedLine)
	assert.Empty(t, p.debug().Configuration.Error)
}

// busy is an address at which somebody listens.
func busy(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	return ln.Addr().String()
}

// What is not changed keeps its flows: a stream that runs in them stays where it is while the others are replaced.
func TestAnUnchangedModelKeepsItsFlows(t *testing.T) {
	e, d := newEngine(t), newEngine(t)
	hold := d.holds()
	p := start(t, gatewayYAML("")+pairYAML("m", e, d, "")+pairYAML("n", e, d, ""))
	streams := map[string]*stream{}
	for _, model := range []string{"m", "n"} {
		streams[model] = p.stream("/v1/completions", `{"model":"`+model+`","prompt":"x","stream":true}`)
	}
	p.configure("# a comment\n" + gatewayYAML("") + pairYAML("m", e, d, "") + pairYAML("n", e, d, retries(3)))
	p.logs(1, reloadedLine)
	p.logs(1, `msg="a ModelServer ends"`) // once the new one's engines are known
	sessions := map[string]int{}
	for _, m := range p.debug().Models {
		sessions[m.Model] = len(m.Sessions)
	}
	assert.Equal(t, map[string]int{"m": 1, "n": 0}, sessions, "n has new flows")
	assert.Equal(t, 1, strings.Count(p.log.String(), `msg="a ModelServer ends"`))
	close(hold)
	for model, s := range streams {
		assert.Equal(t, "data: [DONE]", s.rest(t), model)
	}
}

// A rollout goes from 0 to 100 percent and back while requests run, and none fails.
func TestARolloutGoesForthAndBack(t *testing.T) {
	t.Parallel()
	e, d := newEngine(t), newEngine(t)
	config := func(weight int) string {
		return gatewayYAML("") + pairYAML("m", e, d, fmt.Sprintf(
			"  kvConnector: {type: http, timeouts: {connect: 30s, healthCheck: 30s}}\n"+
				"  rollout: {weight: %d, kvConnector: {type: sharedstorage}}\n", weight))
	}
	p := start(t, config(0))
	tr := send(t, p.client+"/v1/completions", func(int64) string { return completion }, 200)
	shares := map[string]float64{}
	for i, weight := range []int{50, 100, 50, 0} {
		p.configure(config(weight))
		p.logs(i+1, reloadedLine)
		tr.answered(t)
		before := servedBy(p)
		var main, other float64
		require.Eventually(t, func() bool {
			after := servedBy(p)
			main, other = after["http"]-before["http"], after["sharedstorage"]-before["sharedstorage"]
			return main+other >= 100
		}, time.Minute, 20*time.Millisecond)
		shares[fmt.Sprint(i, ":", weight)] = other / (main + other)
	}
	assert.Empty(t, tr.end(), "of %d\n%s", tr.sent.Load(), p.log)
	assert.InDelta(t, 0.5, shares["0:50"], 0.3)
	assert.Greater(t, shares["1:100"], 0.9, "but for those that are counted late")
	assert.Less(t, shares["3:0"], 0.1)
}

// servedBy counts the requests that have ended, by connector.
func servedBy(p *program) map[string]float64 {
	metrics := p.page("/metrics")
	counts := map[string]float64{}
	for line := range strings.Lines(metrics) {
		if !strings.HasPrefix(line, "pd_request_duration_seconds_count{") {
			continue
		}
		for _, name := range []string{"http", "sharedstorage"} {
			if strings.Contains(line, `pd_connector="`+name+`"`) {
				var n float64
				_, err := fmt.Sscan(line[strings.LastIndex(line, " ")+1:], &n)
				require.NoError(p.t, err, line)
				counts[name] += n
			}
		}
	}
	return counts
}

// A model whose connector listens keeps its port over a change.
func TestAReloadKeepsListeners(t *testing.T) {
	e, d := newEngine(t), newEngine(t)
	addr := "127.0.0.1:" + unusedPort(t)
	config := func(attempts int) string {
		return gatewayYAML("") + pairYAML("m", e, d, fmt.Sprintf("  kvConnector: {type: ascend-layerwise, config: "+
			"{callbackListen: %q}, retry: {maxAttempts: %d}}\n", addr, attempts))
	}
	p := start(t, config(2))
	for i := range 5 {
		p.configure(config(3 + i))
		p.logs(i+1, reloadedLine)
		conn, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		require.NoError(t, conn.Close())
	}
	assert.NotContains(t, p.log.String(), refusedLine)
	p.configure(gatewayYAML("") + pairYAML("m", e, d, ""))
	p.logs(6, reloadedLine)
	isFree(t, addr, "the port is free when nobody needs it")
}

// Engines that have announced themselves stay known while their model changes.
func TestAReloadKeepsAnnouncedEngines(t *testing.T) {
	t.Parallel()
	pe, de := newEngine(t, "m"), newEngine(t, "m")
	addr := "127.0.0.1:" + unusedPort(t)
	config := func(attempts int) string {
		return gatewayYAML("") + announcing("m", fmt.Sprintf("http, retry: {maxAttempts: %d}", attempts), "http: "+addr)
	}
	p := start(t, config(2))
	for url, role := range map[string]string{pe.URL: "prefill", de.URL: "decode"} {
		require.Equal(t, http.StatusCreated, p.register(role, url, role, nil))
	}
	reaches(t, p, pe, de)
	// the second change makes new connections, and so a new pool, at the listener that is there
	for i, changed := range []string{
		config(3), strings.Replace(config(3), "retry:", "timeouts: {connect: 30s}, retry:", 1), config(3),
	} {
		p.configure(changed)
		p.logs(i+1, reloadedLine)
		for range 20 {
			status, _, body := p.complete(completion)
			assert.Equal(t, http.StatusOK, status, body)
			time.Sleep(10 * time.Millisecond)
		}
		p.logs(i+2, `msg="a ModelServer is served"`)
	}
	assert.NotContains(t, p.log.String(), refusedLine)
	status, _, _ := do(t, http.MethodGet, p.api(), "")
	assert.Equal(t, http.StatusOK, status, "the listener is there")
}

// What holds from the program's start is told, and the rest of the file is served.
func TestAReloadTellsWhatNeedsARestart(t *testing.T) {
	p, e, d := startHTTP(t, "", "")
	status, _, _ := do(t, http.MethodGet, p.client+"/v1/other", "")
	assert.Equal(t, http.StatusNotFound, status)
	p.configure("apiVersion: pdkit.dev/v1alpha1\nkind: Gateway\nspec: {listen: 127.0.0.1:1, admin: \"\", " +
		"maxBodyBytes: 10, forwardHeaders: [X-Tenant], passthrough: decode, " +
		"passthroughPaths: [/v1/other], drainTimeout: 77s}\n---\n" + pairYAML("m", e, d, ""))
	p.logs(1, reloadedLine)
	p.logs(1, `msg="a change needs a restart" fields="spec.listen, spec.admin, spec.maxBodyBytes, `+
		`spec.forwardHeaders"`)
	status, _, _ = do(t, http.MethodGet, p.client+"/v1/other", "")
	assert.Equal(t, http.StatusOK, status)
	p.signal()
	p.logs(1, "atMost=1m17s")
	p.ended(exitOK)
}

// SIGHUP is no second signal: it cuts nothing while the gateway drains.
func TestSIGHUPDoesNotEndADrain(t *testing.T) {
	p, _, d := startHTTP(t, "", "")
	hold := d.holds()
	s := openStream(t, p)
	p.signal()
	p.logs(1, "msg=draining")
	p.signals <- syscall.SIGHUP
	eventually(t, func() bool { return len(p.signals) == 0 })
	time.Sleep(50 * time.Millisecond)
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
	p.ended(exitOK)
}
