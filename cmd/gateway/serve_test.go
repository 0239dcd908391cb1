// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const completion = `{"model":"m","prompt":"the secret prompt","max_tokens":4}`

func TestARequestGoesThroughBothEngines(t *testing.T) {
	g, p, d := startHTTP(t, "", "")
	status, h, body := g.complete(completion, "X-Request-Id", "mine", "Cookie", "a=b")
	assert.Equal(t, http.StatusOK, status, body)
	assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"))
	assert.Equal(t, []string{"mine"}, h.Values("X-Request-Id"))
	assert.Contains(t, p.last().body, `"max_tokens":1`)
	assert.Equal(t, completion, d.last().body)
	assert.Empty(t, d.last().header.Get("Cookie"))
	assert.NotContains(t, g.log.String(), "secret")
}

func TestModelsAreKeptApart(t *testing.T) {
	p, d1, d2 := newEngine(t), newEngine(t), newEngine(t)
	g := start(t, gatewayYAML("")+pairYAML("one", p, d1, "")+pairYAML("*", p, d2, ""))
	for model, want := range map[string]*engine{`"one"`: d1, `"other"`: d2, `null`: d2} {
		before := want.count()
		status, _, _ := g.complete(`{"model":` + model + `,"prompt":"x"}`)
		assert.Equal(t, http.StatusOK, status)
		assert.Equal(t, before+1, want.count(), model)
	}
}

func TestTheClientsSideServesNothingOfTheOperators(t *testing.T) {
	g, p, d := startHTTP(t, "", "")
	for _, path := range []string{"/", "/healthz", "/readyz", "/metrics", "/debug/pd", "/v1/models/", "/v1/completions",
		"/tokenize"} {
		status, h, body := do(t, http.MethodGet, g.client+path, "", "X-Request-Id", "mine")
		assert.Equal(t, http.StatusNotFound, status, path)
		assert.JSONEq(t, `{"error":{"message":"there is no such path and method here","type":"invalid_request_error",`+
			`"param":null,"code":"not_found"}}`, body)
		assert.Equal(t, "mine", h.Get("X-Request-Id"))
	}
	assert.Zero(t, d.count()+p.count(), "no engine has heard of it")
}

func TestModelsListsTheUnionAndNeverFails(t *testing.T) {
	p, d1 := newEngine(t, "prefill-only"), newEngine(t, "a", "shared")
	d2 := listenEngine(t, "127.0.0.1:"+unusedPort(t), "shared", "b")
	g := start(t, gatewayYAML("")+pairYAML("m", p, d1, "")+pairYAML("n", p, d2, ""))
	ids := func(auth string) (list []string) {
		status, h, body := do(t, http.MethodGet, g.client+modelsPath, "", "Authorization", auth)
		require.Equal(t, http.StatusOK, status)
		require.NotEmpty(t, h.Get("X-Request-Id"))
		var l struct {
			Object string
			Data   []struct{ ID string }
		}
		require.NoError(t, json.Unmarshal([]byte(body), &l))
		require.Equal(t, "list", l.Object)
		for _, m := range l.Data {
			list = append(list, m.ID)
		}
		return list
	}
	assert.Equal(t, []string{"a", "shared", "b"}, ids("Bearer 1"))
	assert.Equal(t, "Bearer 1", d1.last().header.Get("Authorization"))
	d1.set(func(e *engine) { e.sick = true })
	assert.Equal(t, []string{"shared", "b"}, ids("Bearer 3"), "an engine that fails is left out")
	d2.CloseClientConnections()
	d2.Listener.Close()
	assert.Empty(t, ids("Bearer 4"), "and so is one that is gone")
}

func TestReadinessFollowsTheProbes(t *testing.T) {
	t.Parallel()
	g, p, _ := startHTTP(t, "", "")
	status, body := g.ready()
	assert.Equal(t, http.StatusOK, status)
	assert.JSONEq(t, `{"ready":true,"models":[{"model":"m","ready":true}]}`, body)
	p.set(func(e *engine) { e.sick = true })
	g.becomes(http.StatusServiceUnavailable)
	_, body = g.ready()
	assert.JSONEq(t, `{"ready":false,"models":[{"model":"m","ready":false,"reason":"no prefill engine is ready"}]}`,
		body)
	status, h, _ := g.complete(completion)
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.NotEmpty(t, h.Get("Retry-After"))
	body = g.page("/debug/pd")
	assert.Contains(t, body, `"phase": "not-ready"`)
	assert.Contains(t, body, `"healthy": false`)
	p.set(func(e *engine) { e.sick = false })
	g.becomes(http.StatusOK)
	eventually(t, func() bool { return strings.Contains(g.log.String(), "engine is ready again") })
}

func TestOperatorsSeeWhatIsInFlight(t *testing.T) {
	g, _, d := startHTTP(t, "", "")
	hold := d.holds()
	s := openStream(t, g)
	body := g.page("/debug/pd")
	var debug struct{ Models []debugModel }
	require.NoError(t, json.Unmarshal([]byte(body), &debug))
	require.Len(t, debug.Models, 1)
	m := debug.Models[0]
	assert.Equal(t, "http", m.Connector)
	require.Len(t, m.Sessions, 1)
	assert.Equal(t, "stream", m.Sessions[0].Phase)
	assert.Positive(t, m.Sessions[0].Age)
	require.Len(t, m.Endpoints, 2)
	assert.Equal(t, d.URL, m.Endpoints[1].URL)
	assert.Equal(t, 1, m.Endpoints[1].Load)
	assert.NotContains(t, body, "secret")
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
	metrics := g.page("/metrics")
	for _, want := range []string{`pd_endpoints{gen_ai_request_model="m",pd_phase="ready",pd_role="decode"} 1`,
		`pd_request_duration_seconds_count{`, `go_goroutines `} {
		assert.Contains(t, metrics, want)
	}
	status, _, health := do(t, http.MethodGet, g.admin+"/healthz", "")
	assert.Equal(t, http.StatusOK, status)
	assert.Equal(t, "ok\n", health)
	status, _, _ = do(t, http.MethodPost, g.admin+"/v1/completions", completion)
	assert.Equal(t, http.StatusNotFound, status, "clients are not served here")
}

// stream is a streamed response whose first event has been read.
type stream struct {
	resp *http.Response
	r    *bufio.Reader
}

// openStream begins a completion by the stand-ins.
func openStream(t *testing.T, g *program) *stream {
	t.Helper()
	s := g.stream("/v1/completions", `{"model":"m","prompt":"secret","stream":true}`)
	line, err := s.r.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "data: {\"choices\":[{\"text\":\"a\"}]}\n", line)
	return s
}

// stream posts a body, and reads no more than the head of the response.
func (p *program) stream(path, body string) *stream {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodPost, p.client+path, strings.NewReader(body))
	require.NoError(p.t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	require.NoError(p.t, err)
	p.t.Cleanup(func() { resp.Body.Close() })
	return &stream{resp, bufio.NewReader(resp.Body)}
}

// rest reads to the end and returns the last event, or the word cut.
func (s *stream) rest(t *testing.T) string {
	t.Helper()
	late := time.AfterFunc(20*time.Second, func() {
		t.Error("the response does not end")
		s.resp.Body.Close()
	})
	defer late.Stop()
	last := ""
	for {
		line, err := s.r.ReadString('\n')
		if line = strings.TrimSpace(line); line != "" {
			last = line
		}
		if err != nil {
			if err.Error() != "EOF" {
				return "cut"
			}
			return last
		}
	}
}

func TestADrainLetsRunningStreamsEnd(t *testing.T) {
	g, _, d := startHTTP(t, "", "")
	hold := d.holds()
	s := openStream(t, g)
	g.signal()
	eventually(t, func() bool {
		status, body := g.ready()
		return status == http.StatusServiceUnavailable && strings.Contains(body, `"draining": true`)
	}, "readiness fails first")
	eventually(t, func() bool {
		status, h, _ := g.complete(completion)
		return status == http.StatusServiceUnavailable && h.Get("Retry-After") != ""
	}, "what comes now is refused, not dropped")
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
	g.ended(exitOK)
}

func TestADrainCutsStreamsWhenItsTimeIsUp(t *testing.T) {
	g, _, d := startHTTP(t, ", drainTimeout: 200ms", "")
	d.holds()
	s := openStream(t, g)
	begun := time.Now()
	g.signal()
	assert.Equal(t, "cut", s.rest(t), "a cut stream does not look whole")
	assert.GreaterOrEqual(t, time.Since(begun), 150*time.Millisecond)
	g.ended(exitOK)
}

func TestASecondSignalCutsAtOnce(t *testing.T) {
	g, _, d := startHTTP(t, "", "")
	d.holds()
	s := openStream(t, g)
	g.signal()
	g.signal()
	begun := time.Now()
	assert.Equal(t, "cut", s.rest(t))
	g.ended(exitOK)
	assert.Less(t, time.Since(begun), 20*time.Second)
}

func TestAdminCanBeOff(t *testing.T) {
	g, _, _ := startHTTP(t, "", "", "-admin", "")
	assert.Equal(t, "http://", g.admin)
	status, _, _ := g.complete(completion)
	assert.Equal(t, http.StatusOK, status)
}

func TestFallbacksAreTaken(t *testing.T) {
	for _, fallback := range []string{"decode", "connector, fallbackConnector: {type: http}"} {
		g, _, _ := startHTTP(t, "", "  kvConnector: {type: nixl, retry: {maxAttempts: 1}, fallback: "+fallback+"}\n")
		status, h, body := g.complete(completion)
		assert.Equal(t, http.StatusOK, status, body)
		assert.Equal(t, "fallback", h.Get("X-PD-Mode"), fallback)
	}
}

func TestUnsupportedRequestsFollowThePolicy(t *testing.T) {
	for policy, want := range map[string]int{"aggregate": http.StatusOK, "refuse": http.StatusBadRequest} {
		g, _, _ := startHTTP(t, "", "  kvConnector: {type: nixl, unsupported: "+policy+"}\n")
		status, _, body := g.complete(`{"model":"m","prompt":["a","b"]}`)
		assert.Equal(t, want, status, body)
	}
}
