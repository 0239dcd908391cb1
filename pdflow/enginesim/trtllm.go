// SPDX-License-Identifier: Apache-2.0

package enginesim

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
	"strconv"
	"strings"
	"sync"
	"time"
)

// minGlobalID is the floor of ids that proxies make; smaller ones are a server's own.
const minGlobalID = 1 << 40

// trtllm is one server's side, after protocols/other-engines.md D.
type trtllm struct {
	*wire
	key     string
	python  bool
	patient time.Duration

	keep int // records

	mu      sync.Mutex
	live    map[string]struct{} // ids of context requests that run
	records []perfRecord
}

func startTRTLLM(h *host) (connector, error) {
	set := h.settings()
	c := &trtllm{
		key: h.extra["internal_request_auth_key"], python: h.extra["transceiver_runtime"] == "PYTHON",
		patient: set.seconds("kv_transfer_timeout_ms", 60000) / 1000, keep: set.count("perf_metrics_max_requests", 0),
		live: map[string]struct{}{},
	}
	if err := set.err(); err != nil {
		return nil, err
	}
	var err error
	if c.wire, err = startWire(h, wireOptions{writes: true, named: c.asked}); err != nil {
		return nil, err
	}
	h.core.setLease(c.patient)
	return c, nil
}

// parsers are the APIs in which TensorRT-LLM reads disaggregated_params.
func (c *trtllm) parsers() map[string]parser {
	return map[string]parser{"/v1/completions": c.reads(parseCompletion), "/v1/chat/completions": c.reads(parseChat)}
}

// serve answers what is TensorRT-LLM's own. Its GET /metrics are statistics of
// iterations, which are off unless asked for; none of vLLM's counters is anywhere.
func (c *trtllm) serve(w http.ResponseWriter, r *http.Request) bool {
	switch r.Method + " " + r.URL.Path {
	case "GET /server_info":
		c.serverInfo(w)
	case "GET /perf_metrics":
		c.giveRecords(w)
	case "GET /metrics":
		writeJSON(w, http.StatusOK, []byte("[]"))
	default:
		return false
	}
	return true
}

func (c *trtllm) serverInfo(w http.ResponseWriter) {
	where := c.where()
	if c.python {
		where["ctx_info_endpoint"] = []any{where["ctx_info_endpoint"]}
	}
	writeJSON(w, http.StatusOK, encode(map[string]any{"disaggregated_params": where}))
}

// where says how other servers reach this one.
func (c *trtllm) where() map[string]any {
	host, port := c.side.address()
	address := net.JoinHostPort(host, strconv.Itoa(port))
	if c.python {
		return map[string]any{"ctx_info_endpoint": "tcp://" + address, "encoded_opaque_state": nil}
	}
	return map[string]any{"encoded_opaque_state": base64.StdEncoding.EncodeToString([]byte(address)), "ctx_info_endpoint": nil}
}

// placeOf reads what where has written.
func placeOf(params kvParams) (place, bool) {
	address := strings.TrimPrefix(params.text("ctx_info_endpoint"), "tcp://")
	if raw, err := base64.StdEncoding.DecodeString(params.text("encoded_opaque_state")); err == nil && len(raw) > 0 {
		address = string(raw)
	}
	host, port, err := net.SplitHostPort(address)
	return place{host: host, port: port}, err == nil
}

// reads gives a call's only sequence its parameters.
func (c *trtllm) reads(parse parser) parser {
	return func(e *target, r *http.Request, body []byte) (*call, *apiError) {
		made, bad := parse(e, r, body)
		if bad != nil {
			return made, bad
		}
		var q struct {
			Params   json.RawMessage `json:"disaggregated_params"`
			TokenIDs []int32         `json:"prompt_token_ids"`
		}
		if bad := decodeBody(body, &q); bad != nil {
			return nil, bad
		}
		params, bad := decodeParams(q.Params)
		if bad != nil {
			return nil, bad
		}
		if r.URL.Path == "/v1/chat/completions" && len(q.TokenIDs) > 0 {
			for _, g := range made.gens {
				g.prompt = q.TokenIDs
			}
		}
		kind := params.text("request_type")
		if params == nil || kind == "context_and_generation" {
			return made, nil
		}
		if len(made.gens) != 1 {
			return nil, badRequest("n", "disaggregated serving takes one prompt and one sequence")
		}
		if bad := c.check(kind, params, r.Header); bad != nil {
			return nil, bad
		}
		g := made.gens[0]
		g.params = params
		if kind == "context_only" {
			// It makes the first token; the client's limit decides whether that is the last.
			made.maxTokens, made.limited, made.minTokens, g.minTokens = 1, true, min(made.minTokens, 1), min(g.minTokens, 1)
		}
		return made, nil
	}
}

func (c *trtllm) check(kind string, params kvParams, header http.Header) *apiError {
	id, err := strconv.ParseInt(string(params["disagg_request_id"]), 10, 64)
	if params.given("disagg_request_id") && (err != nil || id < minGlobalID) {
		return badRequest("disaggregated_params", "disagg_request_id is not a global id")
	}
	switch kind {
	case "context_only":
		return nil
	case "generation_only":
	default:
		return badRequest("disaggregated_params", "Unknown request type")
	}
	if !params.given("ctx_request_id") {
		return badRequest("disaggregated_params", "ctx_request_id is required for a generation request")
	}
	if string(params["schedule_style"]) != "1" && !params.given("first_gen_tokens") {
		return badRequest("disaggregated_params", "first_gen_tokens are required for a generation request")
	}
	if !c.authentic(params, header.Get("x-trtllm-disagg-auth")) {
		return badRequest("", "Invalid internal disaggregated request authentication")
	}
	return nil
}

// authentic checks the signature of the parameters that say where a server is. What
// this engine writes there is ASCII, so that Go's JSON is Python's.
func (c *trtllm) authentic(params kvParams, signature string) bool {
	if c.key == "" || !params.given("encoded_opaque_state") && !params.given("ctx_info_endpoint") {
		return true
	}
	signed := map[string]any{"ctx_info_endpoint": nil, "encoded_opaque_state": nil}
	for name := range signed {
		if params.given(name) {
			signed[name] = params.text(name)
		}
	}
	mac := hmac.New(sha256.New, []byte(c.key))
	mac.Write(encode(signed))
	return hmac.Equal([]byte(signature), []byte("sha256="+hex.EncodeToString(mac.Sum(nil))))
}

func (c *trtllm) begin(r *kvRequest) transfer {
	kind := r.params.text("request_type")
	if kind == "" {
		return trtAlone{c: c}
	}
	t := &trtTransfer{c: c, params: r.params, prompt: r.prompt, pulls: kind == "generation_only", style: "0:"}
	if string(r.params["schedule_style"]) == "1" {
		t.style = "1:"
	}
	// A generation server prefers the proxy's id.
	t.id = string(r.params["disagg_request_id"])
	if !r.params.given("disagg_request_id") {
		if t.id = string(r.params["ctx_request_id"]); !t.pulls {
			t.id = strconv.FormatUint(mix(KeyOf(tokenise(r.id))[0], 1)%minGlobalID, 10)
		}
	}
	return t
}

// asked answers a generation server. With the context first the KV is there, or never
// will be; with the generation first it waits.
func (c *trtllm) asked(pipe *Pipe, f Frame, m askMessage) {
	if _, soon := c.side.offers.get(m.Name); soon != nil && strings.HasPrefix(m.Name, "0:") {
		refuse(pipe, f)
		return
	}
	c.side.giveOffered(pipe, f, m)
}

// trtTransfer is one request's side, on either server.
type trtTransfer struct {
	noTransfer
	c      *trtllm
	params kvParams
	prompt []int32
	id     string
	style  string // before the id in an offer's name
	pulls  bool
	bytes  int // of KV that have come
}

func (t *trtTransfer) external() bool { return t.pulls }

// reported is the context server's own prefix cache hit, which the proxy hands on.
func (t *trtTransfer) reported() (int, bool) {
	var usage struct {
		Details struct {
			Cached *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	if !t.params.given("ctx_usage") || json.Unmarshal(t.params["ctx_usage"], &usage) != nil || usage.Details.Cached == nil {
		return 0, false
	}
	return *usage.Details.Cached, true
}

// told are the tokens that the context server has made: they are given out again.
func (t *trtTransfer) told() []int32 {
	var tokens []int32
	if !t.pulls || json.Unmarshal(t.params["first_gen_tokens"], &tokens) != nil {
		return nil
	}
	return tokens
}

var (
	errSameID   = errors.New("two live requests of one id")
	errNoServer = errors.New("the parameters name no context server")
)

// arrived refuses an id that another context request has.
func (t *trtTransfer) arrived(ctx context.Context, _ *sequence) (string, error) {
	if t.pulls {
		return "", nil
	}
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	if _, there := t.c.live[t.id]; there {
		return "", &loadError{err: errSameID}
	}
	t.c.live[t.id] = struct{}{}
	context.AfterFunc(ctx, func() {
		t.c.mu.Lock()
		defer t.c.mu.Unlock()
		delete(t.c.live, t.id)
	})
	return "", nil
}

func (t *trtTransfer) load(ctx context.Context, s *sequence) error {
	to, ok := placeOf(t.params)
	if !ok {
		return &loadError{failures: 1, err: errNoServer}
	}
	ctx, stop := context.WithTimeoutCause(ctx, t.c.patient, errNothing)
	defer stop()
	err := t.c.readNamed(ctx, s, to, t.style+t.id)
	if errors.Is(err, errNothing) {
		return &loadError{failures: 1, err: err}
	}
	if err == nil {
		t.bytes = len(s.blocks) * t.c.core.blockBytes
	}
	return err
}

// finished keeps the KV of a request that the generation server is to go on with.
func (t *trtTransfer) finished(s *sequence, reason string) any {
	t.c.record(t.bytes)
	if !t.pulls && reason == reasonLength {
		t.c.offer(s, t.style+t.id)
	}
	return nil
}

// members are what a context answer has besides.
func (t *trtTransfer) members(s *sequence, _ string) (members, choice map[string]any) {
	if t.pulls {
		return nil, nil
	}
	params := t.c.where()
	params["request_type"], params["first_gen_tokens"], params["draft_tokens"], params["ctx_dp_rank"] = "context_only", s.answer, nil, 0
	params["ctx_request_id"], params["disagg_request_id"] = json.RawMessage(t.id), t.params["disagg_request_id"]
	return map[string]any{"prompt_token_ids": t.prompt}, map[string]any{"disaggregated_params": params}
}
