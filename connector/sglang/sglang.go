// SPDX-License-Identifier: Apache-2.0

// Package sglang is the connector "sglang": SGLang's own prefill/decode disaggregation, in which P sends the prompt's
// KV to D through a rendezvous.
//
// Both legs are sent at once, with the same three members at the top level of the body. bootstrap_host and
// bootstrap_port name P's bootstrap server, at which D asks where P's ranks are. bootstrap_room identifies the pair of
// requests. P's HTTP response comes only after D has taken the KV. So if the flow waited for P's response before
// sending D's leg, both would wait until SGLang's timers end them after 300 s. The client gets D's response. The flow
// reads P's response to its end, since closing it earlier aborts P's request.
//
// P samples the first token and gives it to D with the KV, together with its log probability if P's own request asks
// for log probabilities. So P's leg keeps every member that affects sampling or log probabilities. Only the limit of
// tokens and the stream change.
//
// A room is 63 random bits, new for every attempt: a second live request with the same room can crash both schedulers,
// and a dead one leaves a tombstone. A list of prompts needs a list of rooms. Several choices for one prompt cannot be
// carried: SGLang gives all of them one room. With data-parallel attention both legs name P's rank, and the room is
// chosen to fit it: with follow_bootstrap_room, P's default, P refuses a rank other than the room modulo the ranks.
//
// Facts: SGLang's request structs (python/sglang/srt/managers/io_struct.py, entrypoints/openai/protocol.py),
// disaggregation/ (common/conn.py, prefill.py, utils.py), its router and mini_lb, read at 0.5.x up to 0.5.23; issues
// and changes are named where they matter. README.md beside this file shows the sequence and the engines' settings.
package sglang

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under.
const Name = "sglang"

// DefaultBootstrapPort is where P's bootstrap server listens (--disaggregation-bootstrap-port).
const DefaultBootstrapPort = 8998

// DefaultTransferTimeout is how long P keeps KV for a D that does not ask for it
// (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT), and D waits for KV (SGLANG_DISAGGREGATION_WAITING_TIMEOUT):
// python/sglang/srt/environ.py of 0.5.23.
const DefaultTransferTimeout = 300 * time.Second

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "SGLang")
}

// Options are the connector's settings.
type Options struct {
	BootstrapPort int   `json:"bootstrapPort"` // for a P without the attribute bootstrapPort; default 8998
	PrefillCap    *bool `json:"prefillCap"`    // limit P's leg to one token, as SGLang itself also does; default true
	// How engines are launched to move KV: mooncake (the default), mooncake_tcp (without RDMA), nixl, ascend or mori.
	TransferBackend string `json:"transferBackend"`
	// The shorter one of the engines' two time-outs, if it is not DefaultTransferTimeout.
	TransferTimeout *config.Duration `json:"transferTimeout"`
}

// backends are SGLang's (arg_groups/choices.py of 0.5.23). fake moves nothing.
var backends = []string{"mooncake", "mooncake_tcp", "nixl", "ascend", "mori"}

// Connector is the connector "sglang".
type Connector struct {
	port   int
	uncaps bool
	given  Options
}

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	if o.BootstrapPort < 0 || o.BootstrapPort > 65535 {
		return nil, &config.FieldError{Path: "bootstrapPort", Problem: "is not a port",
			Remedy: "1 to 65535; SGLang's own default is 8998"}
	}
	if b := o.TransferBackend; b != "" && !slices.Contains(backends, b) {
		return nil, &config.FieldError{Path: "transferBackend", Problem: "is none that moves KV",
			Remedy: strings.Join(backends, ", ")}
	}
	if d := o.TransferTimeout; d != nil && *d <= 0 {
		return nil, &config.FieldError{Path: "transferTimeout", Problem: "is not above 0",
			Remedy: "the engines' SGLANG_DISAGGREGATION_WAITING_TIMEOUT, 300s unless they set another"}
	}
	c := &Connector{port: o.BootstrapPort, uncaps: o.PrefillCap != nil && !*o.PrefillCap, given: *o}
	if c.port == 0 {
		c.port = DefaultBootstrapPort
	}
	return c, nil
}

// Traits declares the protocol. P responds only when D has taken the KV. An engine in either mode of disaggregation
// refuses a request without a room (400). The legs can carry several prompts, with lists of rooms, but not n: SGLang
// 0.5.23 copies a prompt's room to all its samples (managers/tokenizer_manager.py, _handle_batch_request), so that P
// responds at once and D waits for 300 s. Only vLLM's D gets no KV because of the other members that Carries names;
// SGLang does not truncate a response's input. /v1/responses has a place for a room since 0.5.20, and /v1/messages
// since 0.5.22. Older engines refuse these requests themselves (400).
//
// Members are those of the rendezvous, and those with which a client would send a leg to another rank or connect it
// with another attempt's request.
//
// The rules are what D compares when it first asks a bootstrap server (common/conn.py of 0.5.23:
// try_ensure_parallel_info, _resolve_rank_mapping): the page size, the KV type, and the pipeline-parallel size, which
// must be P's or 1. Tensor-parallel sizes are no rule: with data-parallel attention D compares the attention's own
// size, which no attribute holds, and with MLA any size fits.
func (c *Connector) Traits() connector.Traits {
	timeout := DefaultTransferTimeout
	if d := c.given.TransferTimeout; d != nil {
		timeout = time.Duration(*d)
	}
	return connector.Traits{
		Name:       Name,
		Order:      connector.Together,
		RawPrefill: true, // the limits are its own: see limit
		SGLang:     true,
		APIs: []connector.API{
			connector.APIChat, connector.APICompletions, connector.APIResponses, connector.APIMessages,
			connector.APISGLang,
		},
		Members: []string{
			"bootstrap_room", "bootstrap_host", "bootstrap_port", "bootstrap_pair_key", "routed_dp_rank",
			"data_parallel_rank", "data_parallel_rank_decode", "disagg_prefill_dp_rank", "decode_tp_size",
		},
		Carries: []string{
			"prompt", "prompt_embeds", "text", "input_ids", "prompt_logprobs", "echo", "truncate_prompt_tokens",
			"use_beam_search", "truncation",
		},
		Handoff: connector.Handoff{TransferTimeout: timeout},
		Serving: connector.Serving{PairOnly: true},
		PairRules: []attr.PairRule{
			attr.Same(attr.BlockSize), attr.Same(attr.KVCacheDtype),
			{Attribute: attr.PPSize, Compatible: func(p, d string) bool { return p == d || d == "1" }},
		},
	}
}

// Prefill gives P the client's request with the rendezvous and a limit of one token. It never asks for a stream: the
// flow reads P's response as one JSON value, and SGLang transfers the KV either way.
//
// P's rank is named although the room fits it, since P may balance by another method than follow_bootstrap_room.
func (c *Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	if err := c.rendezvous(s, leg, "routed_dp_rank"); err != nil {
		return err
	}
	if !c.uncaps {
		limit(leg)
	}
	adapter(s, leg)
	leg.NoStream()
	return nil
}

// Decode gives D the client's request with the same rendezvous.
func (c *Connector) Decode(_ context.Context, s *connector.Session, _ *connector.PrefillResult,
	leg *connector.Leg) error {
	adapter(s, leg)
	return c.rendezvous(s, leg, "disagg_prefill_dp_rank")
}

// adapter asks for the LoRA adapter that the request names as its model, if an engine of the pair lists one of that
// name (attribute adapters). SGLang lists adapters as models, and yet takes the name of one for the base model's: it
// reads an adapter from model only as BASE:ADAPTER (entrypoints/openai/serving_base.py of 0.5.23,
// _parse_model_parameter).
func adapter(s *connector.Session, leg *connector.Leg) {
	r := leg.Request()
	if r.API != connector.APIChat && r.API != connector.APICompletions || !lists(s.Prefill, r.Model) &&
		!lists(s.Decode, r.Model) {
		return
	}
	if _, given := r.Field("lora_path"); !given {
		leg.Set("lora_path", connector.Quote(r.Model))
	}
}

func lists(e discovery.Endpoint, model string) bool {
	all := e.Attribute("adapters")
	return all != "" && slices.Contains(strings.Split(all, ","), model)
}

// limit asks for one token. /v1/responses takes two off max_output_tokens and refuses what is below zero then
// (entrypoints/openai/protocol.py of 0.5.23, ResponsesRequest.to_sampling_params). A client's minimum of one token or
// more stays, as a minimum of one: P samples the first token, and without the minimum it could be the end of sequence.
func limit(leg *connector.Leg) {
	atLeast := minimum(leg.Request())
	if leg.Request().API == connector.APIResponses {
		leg.LimitTokens(3)
	} else {
		leg.LimitTokens(1)
	}
	if !atLeast {
		return
	}
	if leg.Request().API == connector.APISGLang {
		leg.SetAt([]string{"sampling_params", "min_new_tokens"}, json.RawMessage("1"))
		return
	}
	leg.Set("min_tokens", json.RawMessage("1"))
}

// rendezvous writes the members by which the two requests find each other. They are the same on both legs, but for the
// member that names P's rank.
func (c *Connector) rendezvous(s *connector.Session, leg *connector.Leg, rank string) error {
	p, err := c.serverOf(s.Prefill)
	if err != nil {
		return err
	}
	n, list, _ := promptsOf(s.Request)
	r := newRooms(s, p.ranks, n)
	if list {
		leg.Set("bootstrap_host", repeat(connector.Quote(p.host), n))
		leg.Set("bootstrap_port", repeat(connector.Int(p.port), n))
		leg.Set("bootstrap_room", r.list(n))
	} else {
		leg.Set("bootstrap_host", connector.Quote(p.host))
		leg.Set("bootstrap_port", connector.Int(p.port))
		leg.Set("bootstrap_room", connector.Int(r.room(0)))
	}
	if p.ranks > 1 {
		leg.Set(rank, connector.Int(s.PrefillRank))
	}
	return nil
}

// server is what a pair of requests must know about P.
type server struct {
	host        string // the host of its bootstrap server
	port, ranks int
}

// serverOf reads P's attributes. SGLang joins host and port unchanged, so an IPv6 address needs brackets (mini_lb adds
// them, too).
func (c *Connector) serverOf(p discovery.Endpoint) (at server, err error) {
	var errs [3]error
	at.port, errs[0] = attr.Port(p, "bootstrapPort", c.port)
	at.ranks, errs[1] = attr.Int(p, "dpSize", 1, 1, 65535)
	if at.host = strings.TrimSpace(p.Attribute("bootstrapHost")); at.host == "" {
		at.host = p.Host()
	}
	if at.host == "" || strings.ContainsAny(at.host, "/ @") {
		errs[2] = &attr.Error{Endpoint: p.ID, Attribute: "bootstrapHost",
			Problem: "is not a host's name or address"}
	}
	if strings.Contains(at.host, ":") && at.host[0] != '[' {
		at.host = "[" + at.host + "]"
	}
	return at, errors.Join(errs[:]...)
}

// CheckEndpoint reports what an engine's attributes lack.
func (c *Connector) CheckEndpoint(e discovery.Endpoint) error {
	if !e.Role.Has(discovery.RolePrefill) {
		return nil
	}
	_, err := c.serverOf(e)
	return attr.Faults(err, remedies)
}

var remedies = map[string]string{
	"bootstrapHost": "a name or an address without scheme and port",
	"bootstrapPort": "P's --disaggregation-bootstrap-port, 1 to 65535",
	"dpSize":        "P's --dp-size, 1 or more",
}
