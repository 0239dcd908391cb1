// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/enginesim/freeport"
)

// proxy is a small gateway that keeps all rules. Each fault that it is given breaks one of them.
type proxy struct {
	prefill, decode []string
	fault           string
	turn            atomic.Int64
	engines         *http.Client
	mu              sync.Mutex
	last            map[string]json.RawMessage // the handoff of each prompt, for the fault that uses it again
	draining        atomic.Bool
	gone            atomic.Bool
	makers          sync.Map        // of responses, by their ids: URLs
	announced       atomic.Int64    // bytes of bodies
	life            context.Context // ends with the gateway
	hung            sync.Map        // pairs whose transfer did not begin in time
}

// gateway starts proxies within the test.
type gateway struct{ fault string }

func (g gateway) Ready() string { return "/health" }

func (g gateway) Start(ctx context.Context, prefill, decode []string) (*Instance, error) {
	// A connection that is kept meets one process of an engine, and may bring the response to another request.
	transport := &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true,
		DisableKeepAlives: g.fault != "asks one connection" && g.fault != "shifts responses"}
	p := &proxy{prefill: prefill, decode: decode, fault: g.fault, last: map[string]json.RawMessage{},
		engines: &http.Client{Transport: transport}}
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	p.life = life
	if p.is("is impatient") {
		p.engines.Timeout = time.Second
	}
	port, err := freeport.Find(1) // which nobody takes when it drains
	if err != nil {
		end()
		return nil, err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:"+strconv.Itoa(port))
	if err != nil {
		end()
		return nil, err
	}
	if p.is("takes the first length") {
		l = lenient{l}
	}
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: p, ReadHeaderTimeout: time.Minute}}
	s.Start()
	exited, shutdowns := make(chan struct{}), sync.WaitGroup{}
	return &Instance{URL: s.URL, Log: func() string { return "" }, Exited: exited, ExitCode: func() int {
		if g.fault == "exits with 1" {
			return 1
		}
		return 0
	}, Terminate: func() error {
		p.draining.Store(true)
		switch g.fault {
		case "ends at once":
			s.CloseClientConnections()
		case "hangs during the drain":
			close(exited)
			return nil
		}
		shutdowns.Go(func() {
			_ = s.Config.Shutdown(context.WithoutCancel(ctx)) // Stop ends it at the latest
			close(exited)
		})
		return nil
	}, Stop: func() {
		end()
		s.CloseClientConnections()
		s.Close()
		shutdowns.Wait()
		transport.CloseIdleConnections()
	}}, nil
}

// lenient lets net/http, which refuses two lengths, read the first.
type lenient struct{ net.Listener }

type lenientConn struct{ net.Conn }

func (l lenient) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return lenientConn{c}, err
}

var twoLengths = regexp.MustCompile(`(Content-Length: \d+\r\n)Content-Length: \d+\r\n`)

func (c lenientConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	return copy(b, twoLengths.ReplaceAll(b[:n], []byte("$1"))), err
}

func (p *proxy) is(fault string) bool { return p.fault == fault }

func (p *proxy) fail(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"error":{"message":%q}}`, message)
}

const limit = 64 << 20

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet {
		p.get(w, r)
		return
	}
	if len(r.TransferEncoding) > 0 && !p.is("keeps ambiguous connections") {
		w.Header().Set("Connection", "close") // net/http hides whether there was a Content-Length, too
	}
	if p.gone.Load() {
		p.fail(w, http.StatusServiceUnavailable, "no engine is left")
		return
	}
	defer p.announced.Add(-max(r.ContentLength, 0))
	if p.announced.Add(max(r.ContentLength, 0)) > 256<<20 && p.is("has little memory") {
		p.fail(w, http.StatusServiceUnavailable, "no memory")
		return
	}
	if r.URL.Path == "/v1/responses" {
		p.respond(w, r)
		return
	}
	if r.URL.Path != completions && r.URL.Path != chats && !p.is("obeys") {
		p.fail(w, http.StatusNotFound, "not found")
		return
	}
	if p.is("knows short prompts") && r.ContentLength > 1<<19 ||
		r.ContentLength > limit && !p.is("reads bodies of any size") {
		p.fail(w, http.StatusRequestEntityTooLarge, "too large")
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if p.is("reads bodies of any size") && err != nil {
		return
	}
	if p.draining.Load() && p.is("hangs during the drain") {
		<-r.Context().Done()
		return
	}
	members := map[string]json.RawMessage{}
	if err := json.Unmarshal(body, &members); err != nil {
		p.notObject(w, body)
		return
	}
	if p.is("knows one model") && string(members["model"]) != `"`+model+`"` {
		p.fail(w, http.StatusNotFound, "no such model")
		return
	}
	p.disaggregate(w, r, p.mend(members, body), body)
}

func (p *proxy) get(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/health" {
		if p.turn.Add(1) > 1 && p.is("has no health path") { // it is ready once, to be tested at all
			p.fail(w, http.StatusNotFound, "not found")
		}
		return
	}
	resp, err := p.send(r, p.maker(r.URL.Path)+r.URL.Path, nil)
	if err != nil || p.is("has no models") {
		p.fail(w, http.StatusNotFound, "not found")
	}
	if err == nil {
		_, _ = io.Copy(w, resp.Body)
		_ = resp.Body.Close()
	}
}

// respond has one decode engine serve a request of the Responses API alone: the one that it refers to, if any.
func (p *proxy) respond(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var m struct {
		Previous string `json:"previous_response_id"`
	}
	if err != nil || json.Unmarshal(body, &m) != nil {
		p.fail(w, http.StatusBadRequest, "wrong")
		return
	}
	url := p.maker("/" + m.Previous)
	if m.Previous == "" || p.is("forgets who made a response") {
		url = p.decode[int(p.turn.Add(1))%2]
	}
	resp, err := p.send(r, url+r.URL.Path, body)
	if err != nil {
		p.fail(w, http.StatusBadGateway, "no engine could serve the request")
		return
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	var made struct{ ID string }
	if json.Unmarshal(text, &made) == nil {
		p.makers.Store(made.ID, url)
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = w.Write(text)
}

// maker returns the engine that made the response of a path.
func (p *proxy) maker(path string) string {
	if url, ok := p.makers.Load(path[strings.LastIndex(path, "/")+1:]); ok && !p.is("forgets who made a response") {
		return url.(string) //nolint:forcetypeassert // nothing else is stored
	}
	return p.decode[int(p.turn.Load())%2]
}

// notObject refuses what is no JSON object.
func (p *proxy) notObject(w http.ResponseWriter, body []byte) {
	switch {
	case p.is("panics on deep JSON") && bytes.Count(body, []byte("[")) > 1000:
		panic(http.ErrAbortHandler)
	case p.is("answers nonsense with 500"):
		p.fail(w, http.StatusInternalServerError, "wrong")
	default:
		p.fail(w, http.StatusBadRequest, "the body is no object of JSON")
	}
}

// mend applies the faults of reading to the client's body.
func (p *proxy) mend(m map[string]json.RawMessage, body []byte) map[string]json.RawMessage {
	if !p.is("believes clients") {
		delete(m, "kv_transfer_params")
	}
	switch p.fault {
	case "rounds numbers":
		var v map[string]any
		_ = json.Unmarshal(body, &v)
		delete(v, "kv_transfer_params")
		for name, value := range v {
			m[name], _ = json.Marshal(value)
		}
	case "knows members":
		for name := range m {
			if !slices.Contains([]string{"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream",
				"stream_options", "temperature", "min_tokens", "seed"}, name) {
				delete(m, name)
			}
		}
	case "takes the first member":
		if bytes.HasPrefix(body, []byte(`{"prompt":"the first`)) {
			m["prompt"] = json.RawMessage(`"the first of two"`)
		}
	case "reads Latin-1":
		m["prompt"] = bytes.ReplaceAll(m["prompt"], []byte("é"), []byte("Ã©"))
	case "knows text prompts only":
		if len(m["prompt"]) > 0 && m["prompt"][0] == '[' {
			m["prompt"] = json.RawMessage(`"?"`)
		}
	}
	return m
}

// disaggregate runs attempts of both legs.
func (p *proxy) disaggregate(w http.ResponseWriter, r *http.Request, m map[string]json.RawMessage, body []byte) {
	attempts := 4
	if p.is("never retries") {
		attempts = 1
	}
	if p.is("keeps alive by text") && m["stream"] != nil {
		_, _ = io.WriteString(w, "wait\n\n")
	}
	var handoff json.RawMessage
	for attempt := 1; ; attempt++ {
		n := int(p.turn.Add(1))
		last := attempt == attempts
		if handoff == nil || !p.is("uses a handoff twice") {
			var done bool
			if handoff, done = p.prefillLeg(w, r, m, p.prefill[n%2], last); done {
				return
			} else if handoff == nil {
				continue
			}
		}
		pair := []string{p.prefill[n%2], p.decode[(n/2+attempt)%2]}
		if _, hung := p.hung.Load(strings.Join(pair, " ")); hung {
			pair[1] = p.decode[(n/2+attempt+1)%2]
		}
		if p.decodeLeg(w, r, m, handoff, pair, last) || r.Context().Err() != nil {
			return
		}
	}
}

// clone is the client's body for one leg.
func (p *proxy) clone(m map[string]json.RawMessage) map[string]json.RawMessage { return maps.Clone(m) }

func (p *proxy) prefillBody(m map[string]json.RawMessage) []byte {
	leg := p.clone(m)
	if !p.is("prefills all tokens") {
		leg["max_tokens"] = json.RawMessage("1")
		if leg["max_completion_tokens"] != nil && !p.is("forgets max_completion_tokens") {
			leg["max_completion_tokens"] = json.RawMessage("1")
		}
	}
	if !p.is("keeps min_tokens") {
		delete(leg, "min_tokens")
	}
	if p.is("salts decode only") {
		delete(leg, "cache_salt")
	}
	if !p.is("streams prefill") {
		delete(leg, "stream")
		delete(leg, "stream_options")
	}
	if leg["kv_transfer_params"] == nil {
		leg["kv_transfer_params"] = json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false}`)
	}
	text, _ := json.Marshal(leg)
	return text
}

// prefillLeg returns P's handoff. done says that the client has its answer.
func (p *proxy) prefillLeg(w http.ResponseWriter, r *http.Request, m map[string]json.RawMessage, url string,
	last bool) (handoff json.RawMessage, done bool) {
	if p.is("remembers handoffs") {
		p.mu.Lock()
		defer p.mu.Unlock()
		if old := p.last[string(m["prompt"])]; old != nil {
			return old, false
		}
	}
	resp, err := p.send(r, url+r.URL.Path, p.prefillBody(m))
	if p.is("decodes after a failed prefill") && (err != nil || resp.StatusCode >= 500) {
		return json.RawMessage("null"), false
	}
	if err != nil {
		return nil, p.lastly(w, last, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	text = p.withoutAddresses(resp.StatusCode, text)
	switch {
	case p.speaksForItself(resp) && !last:
		return nil, false
	case p.is("retries 400") && resp.StatusCode == http.StatusBadRequest && !last:
		return nil, false
	case p.is("decodes after 400") && resp.StatusCode == http.StatusBadRequest:
		return json.RawMessage("null"), false
	case resp.StatusCode == http.StatusBadRequest && p.is("hides texts"):
		p.fail(w, http.StatusBadRequest, "wrong")
		return nil, true
	case resp.StatusCode >= 400 && (resp.StatusCode < 500 || last):
		p.gone.Store(p.is("gives up for good"))
		if !p.is("drops Retry-After") {
			w.Header().Set("Retry-After", resp.Header.Get("Retry-After"))
		}
		w.WriteHeader(resp.StatusCode)
		_, _ = w.Write(text)
		return nil, true
	case resp.StatusCode != http.StatusOK || err != nil:
		return nil, p.lastly(w, last, errors.New("bad response"))
	}
	var answer struct {
		chunk
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	_ = json.Unmarshal(text, &answer)
	if answer.Usage != nil && answer.Usage.Details.Cached != nil && !p.is("bills what decode took over") &&
		bytes.HasSuffix(answer.Params, []byte("}")) && !bytes.Contains(answer.Params, []byte("cached_tokens")) {
		answer.Params = fmt.Appendf(answer.Params[:len(answer.Params)-1:len(answer.Params)-1],
			`,"remote_prefill_cached_tokens":%d}`, *answer.Usage.Details.Cached)
	}
	if p.is("drops the handoff") {
		return json.RawMessage("null"), false
	}
	if !p.usable(answer.Params) {
		return nil, p.lastly(w, last, errors.New("no handoff"))
	}
	if answer.Params == nil {
		answer.Params = json.RawMessage("null")
	}
	if p.is("remembers handoffs") {
		p.last[string(m["prompt"])] = answer.Params
	}
	return p.handoff(answer.Params), false
}

// usable reports whether a handoff has what D needs.
func (p *proxy) usable(params json.RawMessage) bool {
	var members map[string]any
	_ = json.Unmarshal(params, &members)
	for _, name := range append(needed, "do_remote_prefill") {
		value, given := members[name]
		if !given || value == nil && !p.is("relays nulls") {
			return p.is("relays anything")
		}
	}
	return true
}

// handoff applies the faults of relaying.
func (p *proxy) handoff(params json.RawMessage) json.RawMessage {
	var v map[string]any
	switch p.fault {
	case "rounds numbers":
		_ = json.Unmarshal(params, &v)
	case "relays known members":
		_ = json.Unmarshal(params, &v)
		delete(v, "x_new")
		delete(v, "tp_size")
	default:
		return params
	}
	text, _ := json.Marshal(v)
	return text
}

// lastly answers for a leg that could not be made, if it was the last attempt.
func (p *proxy) lastly(w http.ResponseWriter, last bool, err error) bool {
	if last {
		p.gone.Store(p.is("gives up for good"))
		message := "no engine could serve the request"
		if p.is("tells addresses") {
			message = err.Error()
		}
		if p.is("ends failures well") {
			_, _ = io.WriteString(w, ": wait\n\ndata: [DONE]\n\n")
			return true
		}
		p.fail(w, http.StatusBadGateway, message)
	}
	return last
}

// ends is a reader that ends with an error; nil is its end.
type ends struct{ err error }

func (e ends) Read([]byte) (int, error) { return 0, cmp.Or(e.err, io.EOF) }

// speaksForItself reports whether an engine's refusal says nothing of others: it lacks the model, or has another key.
func (p *proxy) speaksForItself(resp *http.Response) bool {
	return (resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusUnauthorized) &&
		!p.is("asks one engine")
}

var address = regexp.MustCompile(`(http://)?127\.0\.0\.1:\d+`)

func (p *proxy) withoutAddresses(status int, text []byte) []byte {
	if status < 400 || p.is("tells engines' texts") {
		return text
	}
	return address.ReplaceAll(text, []byte("(address)"))
}
