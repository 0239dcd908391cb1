// SPDX-License-Identifier: Apache-2.0

// Package trtllm is TensorRT-LLM's disaggregated serving. A request's disaggregated_params say what a server does with
// it, whatever the server's role.
//
// It reads these of Config.Extra: internal_request_auth_key (then parameters that say where a context server is must be
// signed), kv_transfer_timeout_ms (60000: how long a context server keeps KV, and a generation server waits),
// perf_metrics_max_requests (0: how many requests GET /perf_metrics tells of), transceiver_runtime: CPP, which names
// the context server by encoded_opaque_state (default), or PYTHON, which names it by ctx_info_endpoint, and version:
// 1.3 (default) or 1.2, which knows no ctx_usage. Either refuses parameters that it does not know. With
// event_buffer_max_size (0) above 0, POST /kv_cache_events gives the KV-cache events.
//
// tells_no_id ("1") is for a context server whose response has no disagg_request_id.
package trtllm

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// minGlobalID is the floor of ids that proxies make; smaller ones are a server's own.
const minGlobalID = 1 << 40

// The members of disaggregated_params by release (serve/openai_protocol.py: DisaggregatedParams). The model forbids
// others. The main branch has had ctx_usage since #14177, of 2026-05, after 1.2.1.
var (
	known12 = []string{"request_type", "first_gen_tokens", "ctx_request_id", "encoded_opaque_state", "draft_tokens",
		"disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style"}
	known13 = append(slices.Clone(known12), "first_gen_log_probs", "first_gen_logits", "conversation_id", "ctx_usage")
)

// trtllm is one server's side. See docs/protocols/trtllm.md.
type trtllm struct {
	*proto.Wire
	key     string
	python  bool
	known   []string // the parameters' members
	noID    bool     // a response does not tell disagg_request_id
	patient time.Duration

	keep   int     // records
	events *events // nil: nobody keeps any

	mu      sync.Mutex
	live    map[string]struct{} // ids of context requests that run
	records []perfRecord
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	c := &trtllm{
		key: h.Extra["internal_request_auth_key"], python: h.Extra["transceiver_runtime"] == "PYTHON",
		patient: set.Seconds("kv_transfer_timeout_ms", 60000) / 1000, keep: set.Count("perf_metrics_max_requests", 0),
		live: map[string]struct{}{}, known: known13, noID: h.Extra["tells_no_id"] == "1",
	}
	switch h.Extra["version"] {
	case "", "1.3":
	case "1.2":
		c.known = known12
	default:
		set.Fail(errors.New("setting version of Extra is neither 1.2 nor 1.3"))
	}
	if most := set.Count("event_buffer_max_size", 0); most > 0 {
		c.events = newEvents(most, h.Core.Blocks())
		h.Core.Tell(c.events)
	}
	var err error
	if c.Wire, err = proto.StartWire(set, proto.Options{Writes: true, Named: c.asked, Lease: c.patient}); err != nil {
		return nil, err
	}
	return c, nil
}

// Parsers are the APIs in which TensorRT-LLM reads disaggregated_params.
func (c *trtllm) Parsers() map[string]api.Parser {
	return map[string]api.Parser{"/v1/completions": c.reads(api.ParseCompletion),
		"/v1/chat/completions": c.reads(api.ParseChat)}
}

// Serve answers the paths that are TensorRT-LLM's own. Its GET /metrics has statistics of iterations, which are off by
// default, and none of vLLM's counters.
func (c *trtllm) Serve(w http.ResponseWriter, r *http.Request) bool {
	switch r.Method + " " + r.URL.Path {
	case "GET /server_info":
		c.serverInfo(w)
	case "GET /perf_metrics":
		c.giveRecords(w)
	case "POST /kv_cache_events":
		c.events.take(w)
	case "GET /metrics":
		api.WriteJSON(w, http.StatusOK, []byte("[]"))
	default:
		return false
	}
	return true
}

func (c *trtllm) serverInfo(w http.ResponseWriter) {
	where := c.where()
	if c.python {
		where = where.With(python.Object{"ctx_info_endpoint", []string{"tcp://" + c.SideAddress()}})
	}
	api.WriteJSON(w, http.StatusOK, python.Encode(map[string]any{"disaggregated_params": where}))
}

// where says how other servers reach this one.
func (c *trtllm) where() python.Object {
	address := c.SideAddress()
	if c.python {
		return python.Object{"ctx_info_endpoint", "tcp://" + address, "encoded_opaque_state", nil}
	}
	return python.Object{"ctx_info_endpoint", nil,
		"encoded_opaque_state", base64.StdEncoding.EncodeToString([]byte(address))}
}

// placeOf reads what where has written.
func placeOf(params core.Params) (proto.Place, bool) {
	address := strings.TrimPrefix(params.Text("ctx_info_endpoint"), "tcp://")
	if raw, err := base64.StdEncoding.DecodeString(params.Text("encoded_opaque_state")); err == nil && len(raw) > 0 {
		address = string(raw)
	}
	host, port, err := net.SplitHostPort(address)
	return proto.Place{Host: host, Port: port}, err == nil
}

// reads gives a call's only sequence its parameters.
func (c *trtllm) reads(parse api.Parser) api.Parser {
	return func(e *api.Engine, r *http.Request, body []byte) (*api.Call, *api.Error) {
		made, bad := parse(e, r, body)
		if bad != nil {
			return made, bad
		}
		var q struct {
			Params   json.RawMessage `json:"disaggregated_params"`
			TokenIDs []int32         `json:"prompt_token_ids"`
		}
		if bad := api.DecodeBody(body, &q); bad != nil {
			return nil, bad
		}
		params, bad := api.DecodeParams(q.Params)
		if bad != nil {
			return nil, bad
		}
		if r.URL.Path == "/v1/chat/completions" && len(q.TokenIDs) > 0 {
			for _, g := range made.Gens {
				g.Prompt = q.TokenIDs
			}
		}
		kind := params.Text("request_type")
		if params == nil || kind == "context_and_generation" {
			return made, nil
		}
		if len(made.Gens) != 1 {
			return nil, api.BadRequest("n", "disaggregated serving takes one prompt and one sequence")
		}
		if bad := c.check(kind, params, r.Header); bad != nil {
			return nil, bad
		}
		g := made.Gens[0]
		g.Params = params
		if kind == "context_only" {
			// It makes the first token; the client's limit decides whether that is the last.
			made.OneToken()
		}
		return made, nil
	}
}

func (c *trtllm) check(kind string, params core.Params, header http.Header) *api.Error {
	for name := range params {
		if !slices.Contains(c.known, name) {
			return api.BadRequest("disaggregated_params", "%s: Extra inputs are not permitted", name)
		}
	}
	id, err := strconv.ParseInt(string(params["disagg_request_id"]), 10, 64)
	if params.Given("disagg_request_id") && (err != nil || id < minGlobalID) {
		return api.BadRequest("disaggregated_params", "disagg_request_id is not a global id")
	}
	switch kind {
	case "context_only":
		return nil
	case "generation_only":
	default:
		return api.BadRequest("disaggregated_params", "Unknown request type")
	}
	if !params.Given("ctx_request_id") {
		return api.BadRequest("disaggregated_params", "ctx_request_id is required for a generation request")
	}
	if string(params["schedule_style"]) != "1" && !params.Given("first_gen_tokens") {
		return api.BadRequest("disaggregated_params", "first_gen_tokens are required for a generation request")
	}
	if !c.authentic(params, header.Get("x-trtllm-disagg-auth")) {
		return api.BadRequest("", "Invalid internal disaggregated request authentication")
	}
	return nil
}

// authentic checks the signature of the parameters that say where a server is. What this engine writes there is ASCII,
// so that Go's JSON is Python's.
func (c *trtllm) authentic(params core.Params, signature string) bool {
	if c.key == "" || !params.Given("encoded_opaque_state") && !params.Given("ctx_info_endpoint") {
		return true
	}
	signed := map[string]any{"ctx_info_endpoint": nil, "encoded_opaque_state": nil}
	for name := range signed {
		if params.Given(name) {
			signed[name] = params.Text(name)
		}
	}
	mac := hmac.New(sha256.New, []byte(c.key))
	mac.Write(python.Encode(signed))
	return hmac.Equal([]byte(signature), []byte("sha256="+hex.EncodeToString(mac.Sum(nil))))
}

func (c *trtllm) Begin(r *core.Generation) core.Transfer {
	kind := r.Params.Text("request_type")
	if kind == "" {
		return trtAlone{c: c}
	}
	t := &trtTransfer{c: c, params: r.Params, prompt: r.Prompt, pulls: kind == "generation_only", style: "0:"}
	if string(r.Params["schedule_style"]) == "1" {
		t.style = "1:"
	}
	// A generation server prefers the proxy's id.
	t.id = string(r.Params["disagg_request_id"])
	if !r.Params.Given("disagg_request_id") {
		if t.id = string(r.Params["ctx_request_id"]); !t.pulls {
			t.id = strconv.FormatUint(core.Mix(core.KeyOf(core.Tokenise(r.ID))[0], 1)%minGlobalID, 10)
		}
	}
	return t
}

// asked serves a generation server. With the context first, the KV is there now or never. With the generation first,
// the server waits for it.
func (c *trtllm) asked(pipe *core.Pipe, f core.Frame, m proto.AskMessage) {
	if _, soon := c.Side.Offers.Get(m.Name); soon != nil && strings.HasPrefix(m.Name, "0:") {
		proto.Refuse(pipe, f)
		return
	}
	c.Side.GiveOffered(pipe, f, m)
}

// trtTransfer is one request's side, on either server.
type trtTransfer struct {
	core.NoTransfer
	c      *trtllm
	params core.Params
	prompt []int32
	id     string
	style  string // before the id in an offer's name
	pulls  bool
	bytes  int // of KV that have come
}

func (t *trtTransfer) External() bool { return t.pulls }

// Reported is the context server's own prefix cache hit, which the proxy hands on.
func (t *trtTransfer) Reported() (int, bool) {
	var usage struct {
		Details struct {
			Cached *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	if !t.params.Read("ctx_usage", &usage) || usage.Details.Cached == nil {
		return 0, false
	}
	return *usage.Details.Cached, true
}

// Told are the tokens that the context server has made: they are given out again.
func (t *trtTransfer) Told() []int32 {
	var tokens []int32
	if t.pulls {
		t.params.Read("first_gen_tokens", &tokens)
	}
	return tokens
}

var (
	errSameID   = errors.New("two live requests of one id")
	errNoServer = errors.New("the parameters name no context server")
)

// Arrived refuses an id that another context request has.
func (t *trtTransfer) Arrived(ctx context.Context, _ *core.Sequence) (string, error) {
	if t.pulls {
		return "", nil
	}
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	if _, there := t.c.live[t.id]; there {
		return "", &core.LoadError{Err: errSameID}
	}
	t.c.live[t.id] = struct{}{}
	context.AfterFunc(ctx, func() {
		t.c.mu.Lock()
		defer t.c.mu.Unlock()
		delete(t.c.live, t.id)
	})
	return "", nil
}

func (t *trtTransfer) Load(ctx context.Context, s *core.Sequence) error {
	to, ok := placeOf(t.params)
	if !ok {
		return &core.LoadError{Failures: 1, Err: errNoServer}
	}
	ctx, stop := context.WithTimeoutCause(ctx, t.c.patient, proto.ErrNothing)
	defer stop()
	err := t.c.ReadNamed(ctx, s, to, t.style+t.id)
	if errors.Is(err, proto.ErrNothing) {
		return &core.LoadError{Failures: 1, Err: err}
	}
	if err == nil {
		t.bytes = len(s.Blocks) * t.c.Core.BlockBytes
	}
	return err
}

// Finished keeps the KV of a request that the generation server is to go on with.
func (t *trtTransfer) Finished(s *core.Sequence, reason string) any {
	t.c.record(t.bytes)
	if !t.pulls && reason == core.ReasonLength {
		t.c.Offer(s, t.style+t.id)
	}
	return nil
}

// Members are what a context response has besides.
func (t *trtTransfer) Members(s *core.Sequence, _ string) (members, choice python.Object) {
	if t.pulls {
		return nil, nil
	}
	params := append(t.c.where(), "request_type", "context_only", "first_gen_tokens", s.Output, "draft_tokens", nil,
		"ctx_dp_rank", 0, "ctx_request_id", json.RawMessage(t.id))
	if !t.c.noID {
		params = append(params, "disagg_request_id", t.params["disagg_request_id"])
	}
	if slices.Contains(t.c.known, "ctx_usage") {
		params = append(params, "ctx_usage", nil) // the proxy fills it in
	}
	return python.Object{"prompt_token_ids", t.prompt}, python.Object{"disaggregated_params", params}
}
