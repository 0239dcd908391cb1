// SPDX-License-Identifier: Apache-2.0

// Package prompttokens asks engines which token ids the prompt of a request has, before it is sent: an index of KV
// blocks can be asked with them alone.
//
// The engines' own tokenizers and chat templates are the only ones that are sure to be right, so a [Client] asks them:
// POST …/render of the request's API (vLLM with --enable-scale-out), or else POST /tokenize. A program with a tokenizer
// of its own needs no Client. Asking costs a round trip before the pick, and a tokenization that the engine does again.
package prompttokens

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// Why there are no tokens. No error has text of a prompt or an address.
var (
	ErrUnsupported = errors.New("prompttokens: no engine tokenizes such a request")
	ErrNoEngine    = errors.New("prompttokens: no engine is ready")
	ErrPaused      = errors.New("prompttokens: engines have failed to answer, and are not asked for a while")
	ErrFailed      = errors.New("prompttokens: the engine did not answer with tokens in time")

	errModel = errors.New("prompttokens: the engine does not have the model")
)

// Options are a client's options; the zero value has usable defaults.
type Options struct {
	// Client asks the engines; nil is one of its own, which Close closes. For engines that want a key see
	// transport.WithHeader.
	Client http.RoundTripper
	// Timeout is how long a request waits for its tokens at most. Default 250 ms.
	Timeout time.Duration
	// CacheBytes bounds the memory of tokens that are kept for the same request: its other picks, and repetitions.
	// Default 32 MiB.
	CacheBytes int64
}

// Counts are what a client has done.
type Counts struct {
	Asked  int64 // questions to engines
	Failed int64 // of them without tokens
	Hits   int64 // requests whose tokens were known, or being asked for
}

// Client asks the ready engines of a set, in turn. All methods are safe for concurrent use.
type Client struct {
	set  *discovery.Set
	o    Options
	own  *http.Transport // nil if Options.Client is there
	turn atomic.Uint64

	asked, failed, hits atomic.Int64

	mu     sync.Mutex
	cache  cache
	asking map[key]*call
	lacks  map[path]string // → its URL: it has no such path, or forbids it
	row    int             // questions that failed in a row
	pause  time.Time       // nobody is asked before
}

// path is one that an engine may have.
type path struct{ engine, path string }

// New makes a client that asks the engines of a set.
func New(set *discovery.Set, o *Options) *Client {
	c := &Client{set: set, asking: map[key]*call{}, lacks: map[path]string{}}
	if o != nil {
		c.o = *o
	}
	if c.o.Timeout <= 0 {
		c.o.Timeout = 250 * time.Millisecond
	}
	if c.o.CacheBytes <= 0 {
		c.o.CacheBytes = 32 << 20
	}
	if c.o.Client == nil {
		c.own = &http.Transport{DialContext: (&net.Dialer{Timeout: c.o.Timeout}).DialContext,
			TLSHandshakeTimeout: c.o.Timeout, MaxIdleConnsPerHost: 16, IdleConnTimeout: 30 * time.Second}
		c.o.Client = c.own
	}
	c.cache.limit = c.o.CacheBytes
	return c
}

// Close closes idle connections of the client's own. It may be used afterwards, too.
func (c *Client) Close() {
	if c.own != nil {
		c.own.CloseIdleConnections()
	}
}

// Counts returns what the client has done.
func (c *Client) Counts() Counts {
	return Counts{Asked: c.asked.Load(), Failed: c.failed.Load(), Hits: c.hits.Load()}
}

const (
	// After failuresInRow questions without tokens no engine is asked for pauseFor, so that tokenizers that are down
	// do not hold up each request.
	failuresInRow = 3
	pauseFor      = 5 * time.Second
	// An adapter that is not listed is asked for at so many engines.
	enginesMost = 3
	// maxAnswer bounds a response, in bytes: a million tokens in 7 digits and a comma, twice.
	maxAnswer = 16 << 20
)

// Tokens returns the token ids of a request's prompt, which must not be changed. exact says that they are the ones that
// the engine will have; a prompt with images is not. The error is one of this package, or ctx's.
func (c *Client) Tokens(ctx context.Context, r *connector.ClientRequest) (ids []uint32, exact bool, err error) {
	if ids, given, err := own(r); given || err != nil {
		return ids, err == nil, err
	}
	if len(c.set.Load().Endpoints) == 0 {
		return nil, false, ErrNoEngine
	}
	client := ctx
	ctx, cancel := context.WithTimeoutCause(ctx, c.o.Timeout, ErrFailed)
	defer cancel()
	k := keyOf(r)
	for counted := false; ; {
		c.mu.Lock()
		t, known := c.cache.get(k)
		flight := c.asking[k]
		if !known && flight == nil {
			flight = &call{done: make(chan struct{})}
			c.asking[k] = flight
			c.mu.Unlock()
			c.lead(ctx, client, r, k, flight)
			return flight.ids, flight.exact, flight.err
		}
		c.mu.Unlock()
		if !counted {
			counted = true
			c.hits.Add(1)
		}
		if known {
			return t.ids, t.exact, nil
		}
		select {
		case <-flight.done:
			if !flight.left { // else somebody else asks
				return flight.ids, flight.exact, flight.err
			}
		case <-ctx.Done():
			return nil, false, context.Cause(ctx)
		}
	}
}

// call is a question that is being asked. The rest holds when done is closed.
type call struct {
	done chan struct{}
	tokens
	err  error
	left bool // there is no answer, since the client that asked has left
}

// lead asks for all that want the same.
func (c *Client) lead(ctx, client context.Context, r *connector.ClientRequest, k key, flight *call) {
	flight.err = ErrFailed // also if the client panics
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.asking, k)
		if flight.err == nil {
			c.cache.put(k, flight.tokens)
		}
		close(flight.done)
	}()
	t, err := c.ask(ctx, r)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	flight.tokens, flight.err, flight.left = t, err, err != nil && client.Err() != nil
}

// ask asks one engine.
func (c *Client) ask(ctx context.Context, r *connector.ClientRequest) (t tokens, err error) {
	info := contract.API(r.API)
	if r.API == connector.APIUnknown || !strings.HasPrefix(info.Path, "/v1/") {
		return t, ErrUnsupported
	}
	c.mu.Lock()
	paused := time.Now().Before(c.pause)
	c.mu.Unlock()
	if paused {
		return t, ErrPaused
	}
	var last *discovery.Endpoint
	for range enginesMost {
		e := c.next(r.Model)
		if e == nil {
			return t, cmp.Or(err, ErrNoEngine)
		}
		if last != nil && last.ID == e.ID { // it is the only one that may know
			break
		}
		last = e
		if t, err = c.askOne(ctx, e, r, info.Path+"/render"); !errors.Is(err, errModel) {
			break
		}
	}
	if errors.Is(err, errModel) {
		err = ErrUnsupported
	}
	return t, err
}

// askOne asks an engine.
func (c *Client) askOne(ctx context.Context, e *discovery.Endpoint, r *connector.ClientRequest, render string) (
	t tokens, err error) {
	c.asked.Add(1)
	defer func() {
		if err != nil && !errors.Is(context.Cause(ctx), context.Canceled) { // else its client has left
			c.failed.Add(1)
		}
		c.judge(err)
	}()
	at, url := path{e.ID, render}, e.URL.String()
	c.mu.Lock()
	renders := c.lacks[at] != url
	c.mu.Unlock()
	if renders {
		body, err := contract.Body(contract.NewLeg(r))
		if err != nil {
			return t, ErrUnsupported
		}
		var status int
		t, status, err = c.post(ctx, e, render, body)
		if status != http.StatusNotFound && !forbids(status) || errors.Is(err, errModel) { // a key may guard /v1 alone
			return t, err
		}
		c.mu.Lock()
		if len(c.lacks) > 10_000 { // engines come and go
			clear(c.lacks)
		}
		c.lacks[at] = url
		c.mu.Unlock()
	}
	body, exact := tokenizeBody(r)
	if body == nil {
		return t, ErrUnsupported
	}
	t, _, err = c.post(ctx, e, "/tokenize", body)
	t.exact = t.exact && exact
	return t, err
}

// judge pauses after failures in a row. A request that engines refuse is none.
func (c *Client) judge(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil || errors.Is(err, ErrUnsupported) || errors.Is(err, errModel):
		c.row = 0
	case errors.Is(err, context.Canceled):
	default:
		if c.row++; c.row >= failuresInRow {
			c.pause = time.Now().Add(pauseFor)
		}
	}
}

// next returns a ready engine, in turn: one that lists the model among its adapters, if any does.
func (c *Client) next(model string) (other *discovery.Endpoint) {
	all := c.set.Load().Endpoints
	from := c.turn.Add(1)
	for i := range all {
		e := &all[(from+uint64(i))%uint64(len(all))]
		if e.Phase != discovery.PhaseReady || !e.Role.Has(discovery.RoleDecode) && !e.Role.Has(discovery.RolePrefill) {
			continue
		}
		if slices.Contains(strings.Split(e.Attribute("adapters"), ","), model) {
			return e
		}
		if other == nil {
			other = e
		}
	}
	return other
}

func (c *Client) post(ctx context.Context, e *discovery.Endpoint, path string, body []byte) (t tokens, status int,
	err error) {
	u := *e.URL
	u.Path, u.RawPath = u.Path+path, ""
	r := &http.Request{Method: http.MethodPost, URL: &u, Host: u.Host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}, "User-Agent": {"pdkit-prompttokens"}},
		Body:   io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)),
		GetBody: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }}
	resp, err := c.o.Client.RoundTrip(r.WithContext(ctx))
	if err != nil {
		return t, 0, errors.Join(ErrFailed, ctx.Err())
	}
	defer resp.Body.Close()
	switch {
	case forbids(resp.StatusCode):
		return t, resp.StatusCode, ErrFailed // whatever the request is
	case resp.StatusCode == http.StatusNotFound && refusesModel(resp.Body):
		return t, resp.StatusCode, errModel
	case resp.StatusCode >= 400 && resp.StatusCode < 500 && resp.StatusCode != http.StatusTooManyRequests:
		return t, resp.StatusCode, ErrUnsupported // the engine refuses the request, or has no such path
	case resp.StatusCode != http.StatusOK:
		return t, resp.StatusCode, ErrFailed
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil || len(answer) > maxAnswer || !gjson.ValidBytes(answer) {
		return t, resp.StatusCode, errors.Join(ErrFailed, ctx.Err())
	}
	t, err = read(answer)
	return t, resp.StatusCode, err
}

// refusesModel reports whether a 404 is about the request's model, as vLLM writes it, and not about the path.
func refusesModel(body io.Reader) bool {
	b, _ := io.ReadAll(io.LimitReader(body, 64<<10))
	return gjson.GetBytes(b, "error").IsObject()
}

func forbids(status int) bool {
	return status == http.StatusUnauthorized || status == http.StatusForbidden
}

// read takes the tokens out of a response: {"token_ids", "features"}, a list of one of these, or {"tokens"}.
func read(answer []byte) (t tokens, err error) {
	root := gjson.ParseBytes(answer)
	if root.IsArray() {
		all := root.Array()
		if len(all) != 1 {
			return t, ErrUnsupported // several prompts
		}
		root = all[0]
	}
	list := root.Get("token_ids")
	if !list.Exists() {
		list = root.Get("tokens")
	}
	if t.ids = parse(list.Raw); len(t.ids) == 0 {
		return t, ErrFailed
	}
	t.exact = root.Get("features").Type == gjson.Null
	return t, nil
}

// parse reads a JSON array of token ids; nil if it is none.
func parse(raw string) []uint32 {
	var ids []uint32
	if json.Unmarshal([]byte(raw), &ids) != nil {
		return nil
	}
	return ids
}

// own returns the token ids that a request gives as its prompt.
func own(r *connector.ClientRequest) (ids []uint32, given bool, err error) {
	name := contract.API(r.API).Prompt
	if r.API == connector.APISGLang {
		name = "input_ids"
	}
	raw, ok := r.Field(name)
	if r.API == connector.APIChat || r.API == connector.APIMessages || !ok {
		return nil, false, nil
	}
	rest := bytes.TrimLeft(raw, " \t\r\n")
	if len(rest) == 0 || rest[0] != '[' {
		return nil, false, nil
	}
	if ids := parse(string(rest)); len(ids) > 0 {
		return ids, true, nil
	}
	if r.API == connector.APICompletions {
		return nil, false, ErrUnsupported // several prompts
	}
	return nil, false, nil
}

// shaping are the members of a request that shape its prompt, by what /tokenize calls them, too.
var shaping = []string{"model", "prompt", "messages", "tools", "add_generation_prompt", "continue_final_message",
	"add_special_tokens", "chat_template", "chat_template_kwargs", "mm_processor_kwargs"}

// tokenizeBody is the body of POST /tokenize; nil if it cannot be asked so. exact is false if the request has more that
// shapes its prompt.
func tokenizeBody(r *connector.ClientRequest) (body []byte, exact bool) {
	if r.API != connector.APIChat && r.API != connector.APICompletions {
		return nil, false
	}
	members := map[string]json.RawMessage{}
	for _, name := range shaping {
		if raw, ok := r.Field(name); ok {
			members[name] = raw
		}
	}
	exact = true
	for _, name := range []string{"truncate_prompt_tokens", "documents", "reasoning_effort", "tool_choice",
		"response_format", "prompt_embeds"} {
		_, there := r.Field(name)
		exact = exact && !there
	}
	if raw, ok := members["messages"]; ok {
		gjson.GetBytes(raw, "#.content").ForEach(func(_, content gjson.Result) bool {
			content.Get("#.type").ForEach(func(_, kind gjson.Result) bool {
				exact = exact && kind.Str == "text"
				return true
			})
			return true
		})
	}
	body, err := json.Marshal(members)
	if err != nil {
		return nil, false
	}
	return body, exact
}

func keyOf(r *connector.ClientRequest) (k key) {
	h := sha256.New()
	h.Write([]byte{byte(r.API)})
	h.Write([]byte(r.Model))
	h.Write([]byte{0})
	h.Write(r.Body())
	h.Sum(k[:0])
	return k
}
