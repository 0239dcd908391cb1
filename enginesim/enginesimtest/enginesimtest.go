// SPDX-License-Identifier: Apache-2.0

// Package enginesimtest has what the tests of the simulated engines share: a pair of engines with one more that serves
// alone, a client, and requests.
package enginesimtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

// Obj is a JSON object.
type Obj = map[string]any

// Response is what a client sees of a response: status, header and body, or an error.
type Response struct {
	Status int
	Header http.Header
	Body   string
	Err    error
}

// Get reads a member of the response by its path.
func (a Response) Get(path string) gjson.Result { return gjson.Get(a.Body, path) }

// Text is what the model has written in a whole response of any API.
func (a Response) Text() string {
	for _, path := range []string{"choices.0.message.content", "choices.0.text", "output.0.content.0.text",
		"content.0.text"} {
		if r := a.Get(path); r.Exists() {
			return r.String()
		}
	}
	var text strings.Builder
	for _, id := range a.Get("choices.0.token_ids").Array() {
		text.WriteByte(byte(id.Int()))
	}
	return text.String()
}

// StreamText is the text of a stream of any API, piece by piece.
func (a Response) StreamText() string {
	var text strings.Builder
	for _, e := range a.Events() {
		for _, path := range []string{"choices.0.delta.content", "choices.0.text", "delta.text"} {
			text.WriteString(gjson.Get(e, path).String())
		}
		if gjson.Get(e, "type").String() == "response.output_text.delta" {
			text.WriteString(gjson.Get(e, "delta").String())
		}
		for _, id := range gjson.Get(e, "choices.0.token_ids").Array() {
			text.WriteByte(byte(id.Int()))
		}
	}
	return text.String()
}

// Params is the handoff that the response names.
func (a Response) Params(t testing.TB) Obj {
	t.Helper()
	answered(t, a)
	h := Obj{}
	must(t, json.Unmarshal([]byte(a.Get("kv_transfer_params").Raw), &h))
	return h
}

// Events are the data of a stream's events.
func (a Response) Events() []string {
	var out []string
	for line := range strings.SplitSeq(a.Body, "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			out = append(out, data)
		}
	}
	return out
}

// Client sends requests to engines.
type Client struct {
	T    testing.TB
	HTTP *http.Client
}

// NewClient makes a client that follows no redirects.
func NewClient(t testing.TB) *Client {
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return &Client{T: t, HTTP: &http.Client{Transport: tr,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
}

// Post sends a body, JSON or text that is taken as it is, with headers as names and values in turn.
func (c *Client) Post(ctx context.Context, e *enginesim.Engine, path string, body any, headers ...string) Response {
	c.T.Helper()
	data, ok := body.(string)
	if !ok {
		b, err := json.Marshal(body)
		must(c.T, err)
		data = string(b)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+path, bytes.NewReader([]byte(data)))
	must(c.T, err)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return c.do(r)
}

// Get asks an engine for a path.
func (c *Client) Get(e *enginesim.Engine, path string) Response {
	c.T.Helper()
	return c.Fetch(e.URL() + path)
}

func (c *Client) do(r *http.Request) Response {
	resp, err := c.HTTP.Do(r)
	if err != nil {
		return Response{Err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return Response{Status: resp.StatusCode, Header: resp.Header, Body: string(data), Err: err}
}

// Fetch asks for a URL.
func (c *Client) Fetch(url string) Response {
	c.T.Helper()
	r, err := http.NewRequestWithContext(c.T.Context(), http.MethodGet, url, nil)
	must(c.T, err)
	return c.do(r)
}

// Scene is a pair of engines, one more that serves alone, and a client.
type Scene struct {
	*Client
	T       testing.TB
	P, D, O *enginesim.Engine
}

// Block is the block size of all scenes, that of the recorded exchanges.
const Block = 32

// New starts a scene. Each shape may change the configurations of its pair.
func New(t testing.TB, shape ...func(p, d *enginesim.Config)) *Scene {
	t.Helper()
	p := enginesim.Config{BlockSize: Block, MaxModelLen: 2048, Blocks: 256}
	d := enginesim.Config{}
	for _, f := range shape {
		f(&p, &d)
	}
	alone := p
	alone.Connector, alone.KVRole = "none", enginesim.RoleBoth
	if alone.Listen != "" {
		alone.Listen, alone.SideChannel = "127.0.0.1:"+ownPort(t), ""
	}
	// Enough that nothing is evicted or preempted.
	alone.Blocks = max(alone.Blocks, 64<<10/max(alone.BytesPerToken, 16))
	s := &Scene{Client: NewClient(t), T: t}
	var err error
	s.P, s.D, err = enginesim.Pair(p, d)
	must(t, err)
	s.O, err = enginesim.Start(alone)
	must(t, err)
	t.Cleanup(func() {
		s.HTTP.CloseIdleConnections()
		for _, e := range []*enginesim.Engine{s.P, s.D, s.O} {
			must(t, e.Close())
		}
	})
	return s
}

// Of gives the engines of a scene a connector, and settings of its own, as names and values in turn.
func Of(connector string, settings ...string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		for _, c := range []*enginesim.Config{p, d} {
			c.Connector, c.Extra = connector, map[string]string{}
			for i := 0; i+1 < len(settings); i += 2 {
				c.Extra[settings[i]] = settings[i+1]
			}
		}
	}
}

// OwnPorts gives the engines of a scene ports that nobody else gets while an engine is down. settings name further
// ports, which are in Extra: it comes after shapes that set Extra then.
func OwnPorts(t testing.TB, settings ...string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		for _, c := range []*enginesim.Config{p, d} {
			c.Listen, c.SideChannel = "127.0.0.1:"+ownPort(t), "127.0.0.1:"+ownPort(t)
			extra := map[string]string{} // the two may share one
			maps.Copy(extra, c.Extra)
			for _, name := range settings {
				extra[name] = ownPort(t)
			}
			c.Extra = extra
		}
	}
}

func ownPort(t testing.TB) string {
	t.Helper()
	port, err := freeport.One()
	must(t, err)
	return port
}

// Prompt is a text of n bytes that begins with a name.
func Prompt(n int, name string) string {
	return (name + strings.Repeat(" The quick brown fox jumps over the lazy dog", n/40+1))[:n]
}

// With is base with the members of more.
func With(base Obj, more ...Obj) Obj {
	out := Obj{}
	maps.Copy(out, base)
	for _, m := range more {
		maps.Copy(out, m)
	}
	return out
}

// Streamed is a request for a stream.
func Streamed(body Obj) Obj { return With(body, Obj{"stream": true}) }

// Leg is a request with parameters of a transfer.
func Leg(body, params Obj) Obj { return With(body, Obj{"kv_transfer_params": params}) }

// Side is where an engine's side channel listens.
func Side(t testing.TB, e *enginesim.Engine) (host string, port int) {
	t.Helper()
	host, text, err := net.SplitHostPort(e.SideChannel())
	must(t, err)
	port, err = strconv.Atoi(text)
	must(t, err)
	return host, port
}

// Paths of the two APIs that most tests use.
const (
	Completions = "/v1/completions"
	Chat        = "/v1/chat/completions"
)

// Ask sends a chat, which has messages, or a completion to an engine.
func (s *Scene) Ask(e *enginesim.Engine, body Obj, headers ...string) Response {
	s.T.Helper()
	return s.Post(s.T.Context(), e, pathOf(body), body, headers...)
}

func pathOf(body Obj) string {
	if _, chat := body["messages"]; chat {
		return Chat
	}
	return Completions
}

// Prefill runs the prefill leg and gives the handoff.
func (s *Scene) Prefill(body Obj) Obj {
	s.T.Helper()
	return s.PrefillOnly(Leg(body, Obj{"do_remote_decode": true})).Params(s.T)
}

// PrefillOnly runs a prefill leg, which must be served: without parameters unless the body has some.
func (s *Scene) PrefillOnly(body Obj, headers ...string) Response {
	s.T.Helper()
	a := s.Ask(s.P, With(body, Obj{"max_tokens": 1, "stream": false}), headers...)
	answered(s.T, a)
	return a
}

// Pair runs both legs, the second with the first one's handoff.
func (s *Scene) Pair(body Obj) Response {
	s.T.Helper()
	return s.Decode(body, s.Prefill(body))
}

// Silent runs both legs, the second with nothing of the first one's response.
func (s *Scene) Silent(body Obj) Response {
	s.T.Helper()
	s.PrefillOnly(body)
	return s.Ask(s.D, body)
}

// Orders are those in which two legs may come.
var Orders = []string{"P first", "D first", "both at once"}

// Both runs two legs in an order.
func (s *Scene) Both(order string, prefill, decode Obj, headers ...string) (p, d Response) {
	s.T.Helper()
	if order == "P first" {
		p = s.Ask(s.P, prefill, headers...)
		return p, s.Ask(s.D, decode, headers...)
	}
	came := s.D.Stats().Requests
	later := s.AskLater(s.D, decode, headers...)
	if order == "D first" {
		WaitFor(s.T, "D is asked", func() bool { return s.D.Stats().Requests > came })
		time.Sleep(100 * time.Millisecond) // it waits, which not every connector shows
	}
	return s.Ask(s.P, prefill, headers...), <-later
}

// Busy has D at work until stop, with a place for one request and a stream that is slow: others wait in line.
func (s *Scene) Busy() (stop func()) {
	s.T.Helper()
	ctx, cancel := context.WithCancel(s.T.Context())
	got := s.Later(ctx, s.D, Completions, With(Completion("long"), Obj{"max_tokens": 1500}))
	WaitFor(s.T, "D is busy", func() bool { return s.D.Stats().Running == 1 })
	return func() { cancel(); <-got }
}

// Decode runs the decode leg with a handoff.
func (s *Scene) Decode(body, handoff Obj) Response {
	s.T.Helper()
	return s.Ask(s.D, Leg(body, handoff))
}

// Alone is the text that one engine gives.
func (s *Scene) Alone(body Obj) string {
	s.T.Helper()
	a := s.Ask(s.O, body)
	answered(s.T, a)
	return a.Text()
}

// Right asserts that a response is the one that one engine gives alone.
func (s *Scene) Right(body Obj, a Response) {
	s.T.Helper()
	answered(s.T, a)
	want := s.Alone(body)
	expect(s.T, a.Text() == want, "the text is %q, that of one engine alone %q", a.Text(), want)
}

// First is the text of the first token that a prompt gives.
func (s *Scene) First(body Obj) string {
	s.T.Helper()
	return s.Alone(With(body, Obj{"max_tokens": 1}))
}

// Completion is a completion request of 24 tokens.
func Completion(name string) Obj {
	return Obj{"model": "tiny", "prompt": Prompt(240, name), "max_tokens": 24, "temperature": 0}
}

// Request is a request of one of the five APIs for some tokens.
func Request(path, name string, tokens int) Obj {
	text := Prompt(240, name)
	switch path {
	case Chat, "/v1/messages":
		return Obj{"model": "tiny", "messages": []Obj{{"role": "user", "content": text}}, "max_tokens": tokens,
			"temperature": 0}
	case "/v1/responses":
		return Obj{"model": "tiny", "input": text, "max_output_tokens": tokens, "temperature": 0}
	case "/inference/v1/generate":
		ids := make([]int, len(text))
		for i := range ids {
			ids[i] = int(text[i])
		}
		return Obj{"model": "tiny", "token_ids": ids, "sampling_params": Obj{"max_tokens": tokens, "temperature": 0}}
	}
	return Obj{"model": "tiny", "prompt": text, "max_tokens": tokens, "temperature": 0}
}

// Messages of an engine's errors.
const (
	InternalError = "Internal server error"
	EngineError   = "EngineCore encountered an issue. See stack trace (above) for the root cause."
)

// Alive asserts that an engine serves: it is healthy and right.
func (s *Scene) Alive(e *enginesim.Engine) {
	s.T.Helper()
	expect(s.T, s.Get(e, "/health").Status == 200, "the engine is not healthy")
	body := Completion("still there?")
	s.Right(body, s.Ask(e, body))
	expect(s.T, !e.Dead(), "the engine is dead")
}

// Dies asserts that an engine's port closes.
func (s *Scene) Dies(e *enginesim.Engine) {
	s.T.Helper()
	WaitFor(s.T, "port refuses", func() bool { return s.Get(e, "/health").Err != nil })
	expect(s.T, e.Dead(), "its port is closed, but it is not dead")
}

// Unanswered sends a decode that D must not answer, leaves, and waits until D has given up.
func (s *Scene) Unanswered(decode Obj, headers ...string) {
	s.T.Helper()
	s.Waits(decode, headers...)()
	WaitFor(s.T, "D has given up", func() bool { return s.D.Stats().Waiting == 0 && s.D.Stats().Running == 0 })
}

// Lost waits until D has given up, and asserts that it never gets the decode's blocks back: another engine might yet
// write into them.
func (s *Scene) Lost() {
	s.T.Helper()
	WaitFor(s.T, "D has given up", func() bool { return s.D.Stats().Waiting == 0 && s.D.Stats().Running == 0 })
	expect(s.T, s.D.Stats().UsedBlocks == 240/Block+1, "D uses %d blocks", s.D.Stats().UsedBlocks)
}

// Hangs asserts that a decode waits in D and is not answered, and leaves.
func (s *Scene) Hangs(body, handoff Obj) {
	s.T.Helper()
	s.Waits(Leg(body, handoff))()
}

// LoadFails asserts what D answers under its policy when KV could not be loaded: 500, or the text that it computes.
func (s *Scene) LoadFails(policy string, body Obj, a Response) {
	s.T.Helper()
	if policy == enginesim.LoadFailureRecompute {
		s.Right(body, a)
		return
	}
	expect(s.T, a.Status == http.StatusInternalServerError, "status %d: %s", a.Status, a.Body)
	expect(s.T, a.Get("error.message").String() == InternalError, "it says %s", a.Body)
}

// Kills asserts that a request has killed its engine: it is answered with 500, and the port closes.
func (s *Scene) Kills(e *enginesim.Engine, a Response) {
	s.T.Helper()
	expect(s.T, a.Status == http.StatusInternalServerError, "status %d: %s", a.Status, a.Body)
	expect(s.T, a.Get("error.message").String() == EngineError, "it says %s", a.Body)
	s.Dies(e)
}

// Without takes a key out of a handoff.
func Without(key string) func(Obj) { return func(h Obj) { delete(h, key) } }

// Set sets a key of a handoff.
func Set(key string, value any) func(Obj) { return func(h Obj) { h[key] = value } }

// FirstFault is the kind of the first fault of an engine's KV.
func FirstFault(t *testing.T, e *enginesim.Engine) enginesim.KVFaultKind {
	t.Helper()
	f, ok := errors.AsType[*enginesim.KVFault](e.CheckKV())
	if !ok {
		t.Error("CheckKV has found nothing")
		return ""
	}
	return f.Kind
}

// Later sends a request and gives its response when it comes.
func (s *Scene) Later(ctx context.Context, e *enginesim.Engine, path string, body Obj,
	headers ...string) <-chan Response {
	ch := make(chan Response, 1)
	go func() { ch <- s.Post(ctx, e, path, body, headers...) }()
	return ch
}

// AskLater is Ask whose response comes when it comes.
func (s *Scene) AskLater(e *enginesim.Engine, body Obj, headers ...string) <-chan Response {
	return s.Later(s.T.Context(), e, pathOf(body), body, headers...)
}

// Waits sends a decode that D must not answer, and gives what makes its client leave.
func (s *Scene) Waits(decode Obj, headers ...string) (leave func()) {
	s.T.Helper()
	ctx, cancel := context.WithCancel(s.T.Context())
	waiting := s.D.Stats().Waiting
	got := s.Later(ctx, s.D, pathOf(decode), decode, headers...)
	WaitFor(s.T, "D waits", func() bool { return s.D.Stats().Waiting == waiting+1 })
	time.Sleep(50 * time.Millisecond)
	expect(s.T, len(got) == 0, "it was answered")
	return func() {
		cancel()
		if err := (<-got).Err; !errors.Is(err, context.Canceled) {
			s.T.Fatalf("the decode ended with %v", err)
		}
	}
}

// Clean asserts that both engines are idle and that each handoff was used exactly once.
func (s *Scene) Clean() {
	s.T.Helper()
	for _, e := range []*enginesim.Engine{s.P, s.D} {
		expect(s.T, e.WaitIdle(s.T.Context()) == nil, "requests still run")
		err := e.CheckKV()
		expect(s.T, err == nil, "KV: %v", err)
	}
	expect(s.T, s.P.Stats().PinnedBlocks == 0, "P pins blocks")
}

var sampleLine = regexp.MustCompile(`^(vllm:\w+)(?:\{(.*)\})? (\S+)$`)

// Counters reads /metrics as the recordings have it: without engine and model.
func (s *Scene) Counters(e *enginesim.Engine) map[string]float64 {
	out := map[string]float64{}
	for line := range strings.SplitSeq(s.Get(e, "/metrics").Body, "\n") {
		m := sampleLine.FindStringSubmatch(line)
		if m == nil || strings.HasSuffix(m[1], "_bucket") {
			continue
		}
		var labels []string
		for l := range strings.SplitSeq(m[2], ",") {
			if !strings.HasPrefix(l, "engine=") && !strings.HasPrefix(l, "model_name=") && l != "" {
				labels = append(labels, l)
			}
		}
		name := m[1]
		if len(labels) > 0 {
			name += "{" + strings.Join(labels, ",") + "}"
		}
		v, err := strconv.ParseFloat(m[3], 64)
		must(s.T, err)
		out[name] = v
	}
	return out
}

// WaitFor polls until a condition holds.
func WaitFor(t testing.TB, what string, done func() bool) {
	t.Helper()
	late := time.NewTimer(20 * time.Second)
	defer late.Stop()
	again := time.NewTicker(2 * time.Millisecond)
	defer again.Stop()
	for !done() {
		select {
		case <-late.C:
			t.Fatalf("never happened: %s", what)
		case <-again.C:
		}
	}
}

// expect fails a test that goes on all the same.
func expect(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if !ok {
		t.Errorf(format, args...)
	}
}

// must ends a test that cannot go on.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// answered ends a test whose request was not served.
func answered(t testing.TB, a Response) {
	t.Helper()
	if a.Err != nil || a.Status != http.StatusOK {
		t.Fatalf("status %d, error %v: %s", a.Status, a.Err, a.Body)
	}
}
