// SPDX-License-Identifier: Apache-2.0

// Package trtllm is the connector "trtllm": TensorRT-LLM's disaggregated serving, in which a context server P gives its
// KV to a generation server D.
//
// Context first (the default): P gets the client's request with disaggregated_params {request_type: context_only,
// disagg_request_id} and the client's limit of tokens, which P ignores. P returns one choice, whose
// disaggregated_params say where P's KV is and what the first token was. D gets the client's request with these
// parameters, as generation_only, and the prompt as the token ids that P made of it. D itself returns P's first token
// to the client. If P stopped for another reason than the length, the client gets P's response.
//
// Generation first: both legs are sent at once. D learns where P is from P's /server_info, which the connector reads
// before the legs and caches for 30 s.
//
// disagg_request_id is the key of the transfer for both engines. It must be 2^42 or more, since servers treat smaller
// ones as their own (2^40 since the layout of 39 bits). No two live requests may have the same id, across all gateways.
//
// If the parameters hold encoded_opaque_state or ctx_info_endpoint, servers with a key (internal_request_auth_key)
// require a signature in x-trtllm-disagg-auth.
//
// Facts: TensorRT-LLM's main branch of 2026 (tensorrt_llm/serve/openai_disagg_service.py, openai_protocol.py,
// disagg_auth.py, llmapi/disagg_utils.py); the last stable release is 1.2.1, which may lack generation first and the
// signature, and refuses parameters that it does not know, such as ctx_usage. README.md beside this file shows the
// sequence and the engines' settings.
package trtllm

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/connector/internal/querycache"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Name is the name the connector is registered under.
const Name = "trtllm"

// The two ways to dispatch.
const (
	ContextFirst    = "context-first"
	GenerationFirst = "generation-first"
)

// ServerInfoTTL is how long a response of P's /server_info is used.
const ServerInfoTTL = 30 * time.Second

// DefaultTransferTimeout is how long a context server keeps KV that nobody reads, and a generation server waits for it:
// kv_transfer_timeout_ms of cache_transceiver_config (tensorrt_llm/llmapi/llm_args.py, 60000 since TensorRT-LLM #8459;
// before that there was no limit).
const DefaultTransferTimeout = 60 * time.Second

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "TensorRT-LLM")
}

// Options are the connector's settings.
type Options struct {
	Dispatch  string `json:"dispatch"`  // context-first (default) or generation-first
	MachineID int    `json:"machineID"` // 0 to 1023, another one for each gateway
	AuthKey   string `json:"authKey"`   // the servers' internal_request_auth_key; "" signs nothing
	// The servers' kv_transfer_timeout_ms, if it is not DefaultTransferTimeout.
	TransferTimeout *config.Duration `json:"transferTimeout"`
}

// Connector is the connector "trtllm".
type Connector struct {
	machine  uint64
	signer   *signer
	together bool
	given    Options
}

// generationFirst adds what generation first needs. Context first has no [connector.Preparer], so its requests do not
// wait for one.
type generationFirst struct {
	*Connector
	info querycache.Cache[json.RawMessage]
}

// New checks the settings. nil means defaults. For generation first the connector is also a [connector.Preparer] and a
// [connector.Cleaner].
func New(o *Options) (connector.KVConnector, error) {
	if o == nil {
		o = &Options{}
	}
	switch o.Dispatch {
	case "", ContextFirst, GenerationFirst:
	default:
		return nil, &config.FieldError{Path: "dispatch", Problem: "is not a known value",
			Remedy: ContextFirst + " or " + GenerationFirst}
	}
	if o.MachineID < 0 || o.MachineID > 1023 {
		return nil, &config.FieldError{Path: "machineID", Problem: "is not from 0 to 1023",
			Remedy: "another number for each gateway"}
	}
	if d := o.TransferTimeout; d != nil && *d <= 0 {
		return nil, &config.FieldError{Path: "transferTimeout", Problem: "is not above 0",
			Remedy: "the servers' kv_transfer_timeout_ms, 60s unless they set another"}
	}
	c := &Connector{machine: uint64(o.MachineID), signer: newSigner(o.AuthKey), together: o.Dispatch == GenerationFirst,
		given: *o}
	if c.together {
		return &generationFirst{Connector: c, info: querycache.Cache[json.RawMessage]{TTL: ServerInfoTTL}}, nil
	}
	return c, nil
}

// Traits declares the protocol. P must make exactly one choice for one prompt, and only chat and completions have a
// place for the parameters. With generation first the flow sends both legs without waiting for either, so D is there
// when P sends. If a generation request is cancelled while it waits for KV, both servers have leaked blocks
// (TensorRT-LLM #12313, #13713).
//
// The rules are what the engines compare before a transfer: the KV type and the tokens in a block. Parallel sizes may
// differ (cpp/tensorrt_llm/batch_manager/cacheFormatter.cpp and mlaCacheFormatter.cpp: inquireSupport;
// tensorrt_llm/_torch/disaggregation/native/peer.py: _check_peer_compatible).
func (c *Connector) Traits() connector.Traits {
	t := connector.Traits{
		Name:       Name,
		RawPrefill: true, // P needs the client's limit
		APIs:       []connector.API{connector.APIChat, connector.APICompletions},
		Members:    []string{paramsMember},
		Handoff:    connector.Handoff{Member: "choices.0." + paramsMember, TransferTimeout: DefaultTransferTimeout},
		PairRules:  []attr.PairRule{attr.Same(attr.BlockSize), attr.Same(attr.KVCacheDtype)},
	}
	if d := c.given.TransferTimeout; d != nil {
		t.Handoff.TransferTimeout = time.Duration(*d)
	}
	if c.together {
		t.Order, t.Ending.Orphans, t.Handoff.Member = connector.Together, true, ""
	}
	return t
}

const paramsMember = "disaggregated_params"

// id is the attempt's disagg_request_id: bit 62, ten bits of the machine's number, and 52 random bits. It is always
// above 2^42. The official layouts have a time and a counter in place of the random bits. But a counter belongs to one
// process, and requests that live at the same moment have almost the same time. With a time and only 12 random bits in
// each millisecond, a thousand requests a second would have a collision every few seconds. The servers compare ids and
// only check that they are above the minimum (disagg_utils.py).
func (c *Connector) id(s *connector.Session) uint64 {
	return 1<<62 | c.machine<<52 | s.Uint64()>>12
}

// Prefill asks P for the context only. The limit of tokens stays the client's, since with a limit of one P's first
// token is also the last.
func (c *Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	params := append(make([]byte, 0, 96), `{"request_type":"context_only","disagg_request_id":`...)
	params = strconv.AppendUint(params, c.id(s), 10)
	if c.together {
		params = append(params, `,"schedule_style":1`...)
	}
	leg.Set(paramsMember, append(params, '}'))
	leg.NoStream()
	return nil
}

// Decode gives D P's parameters, or with generation first those of P's server. If P's response is not complete, the
// error is [connector.ErrNoTransfer].
func (c *Connector) Decode(_ context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	if c.together {
		return c.decodeTogether(s, leg)
	}
	if p == nil {
		return handoff.NoTransfer("decode was described before prefill answered")
	}
	h, err := readHandoff(p, c.id(s))
	if err != nil {
		return err
	}
	edits := []jsonedit.Edit{{Name: "request_type", Value: generationOnly}, {Name: "ctx_usage", Value: h.usage}}
	if h.usage == nil {
		edits = edits[:1]
	}
	params, err := edited(h.params, edits...)
	if err != nil {
		return err
	}
	if h.promptIDs != nil {
		// Completions have no other place for the token ids. Chat has one of its own.
		if s.API == connector.APIChat {
			leg.Set("prompt_token_ids", h.promptIDs)
		} else {
			leg.Set("prompt", h.promptIDs)
		}
	}
	return c.give(leg, params)
}

var (
	generationOnly  = json.RawMessage(`"generation_only"`)
	generationStyle = json.RawMessage(`1`) // DisaggScheduleStyle.GENERATION_FIRST
)

// give sets D's parameters, signed if they need it.
func (c *Connector) give(leg *connector.Leg, params json.RawMessage) error {
	signature, err := c.signer.sign(params)
	if err != nil {
		return err
	}
	if signature != "" {
		leg.SetHeader(authHeader, signature)
	}
	leg.Set(paramsMember, params)
	return nil
}

func (c *Connector) decodeTogether(s *connector.Session, leg *connector.Leg) error {
	info, ok := s.Prepared.(*querycache.Entry[json.RawMessage])
	if !ok {
		return handoff.NoTransfer("decode was described before P's server was asked")
	}
	id := connector.Int(c.id(s))
	params, err := edited(info.Value, jsonedit.Edit{Name: "request_type", Value: generationOnly},
		jsonedit.Edit{Name: "ctx_request_id", Value: id},
		jsonedit.Edit{Name: "disagg_request_id", Value: id},
		jsonedit.Edit{Name: "schedule_style", Value: generationStyle})
	if err != nil {
		return err
	}
	return c.give(leg, params)
}

// Prepare asks P's server where P is. Requests to the same P share one query.
func (c *generationFirst) Prepare(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
	if s.Prefill.URL == nil {
		return nil, handoff.NoTransfer("there is no server to be asked for its parameters")
	}
	url := infoURL(s)
	info, err := c.info.Get(ctx, url, func() (json.RawMessage, error) { return askServer(ctx, url, call) })
	if err != nil {
		return nil, err
	}
	return info, nil
}

// Clean forgets the server's response after an attempt that failed because of the engines: the server may be another
// process now.
func (c *generationFirst) Clean(_ context.Context, s *connector.Session, cause error, _ connector.Caller) error {
	if info, ok := s.Prepared.(*querycache.Entry[json.RawMessage]); ok && querycache.Doubtful(cause) {
		c.info.Forget(infoURL(s), info)
	}
	return nil
}

func infoURL(s *connector.Session) string { return s.Prefill.URL.JoinPath("server_info").String() }

const maxServerInfo = 1 << 20

func askServer(ctx context.Context, url string, call connector.Caller) (json.RawMessage, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, handoff.NoTransfer("P's server cannot be asked for its parameters")
	}
	resp, err := call(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxServerInfo+1))
	switch {
	case err != nil:
		return nil, err
	case resp.StatusCode != http.StatusOK:
		return nil, handoff.NoTransfer("P's server answered %d to the question for its parameters", resp.StatusCode)
	case len(body) > maxServerInfo:
		return nil, handoff.NoTransfer("what P's server says of itself is too large")
	}
	return readServerInfo(body)
}

// CheckRequest names the member because of which D's response would lack what P has computed: with
// return_context_logits the logits of the prompt are in P's response alone (tensorrt_llm/serve/openai_protocol.py,
// CompletionResponseChoice.context_logits).
func (*Connector) CheckRequest(r *connector.ClientRequest) error {
	const member = "return_context_logits"
	if raw, ok := r.Field(member); ok && string(raw) != "false" {
		return &connector.UnsupportedError{Member: member}
	}
	return nil
}
