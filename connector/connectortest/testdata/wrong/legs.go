// SPDX-License-Identifier: Apache-2.0

package wrong

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/internal/contract"
)

func raw(s string) json.RawMessage { return json.RawMessage(s) }

// edit changes a leg that is right.
type edit = func(s *connector.Session, leg *connector.Leg)

// prefills makes a fault that edits the prefill leg once it is right.
func prefills(rule, what string, wrong edit) Fault { return sends(rule, what, nil, wrong, asIs) }

// decodes makes a fault that edits the decode leg once it is right.
func decodes(rule, what string, wrong edit) Fault { return sends(rule, what, nil, asIs, wrong) }

// keeps gives a leg a member of the client's again.
func keeps(name string) edit {
	return func(s *connector.Session, leg *connector.Leg) {
		if v, ok := s.Field(name); ok {
			leg.Set(name, v)
		}
	}
}

func sets(name, value string) edit {
	return func(_ *connector.Session, leg *connector.Leg) { leg.Set(name, raw(value)) }
}

func setsHeader(name, value string) edit {
	return func(_ *connector.Session, leg *connector.Leg) { leg.SetHeader(name, value) }
}

func drops(names ...string) edit {
	return func(_ *connector.Session, leg *connector.Leg) {
		for _, name := range names {
			leg.Delete(name)
		}
	}
}

const (
	ruleLegs     = "every client API gives two well-formed legs"
	ruleLimit    = "prefill asks for one token in the members that the request used"
	ruleWhole    = "prefill asks for one whole response without log probabilities"
	rulePrefill  = "prefill keeps the client's other members, byte for byte"
	ruleDecode   = "decode is the client's request but for the protocol's own members, byte for byte"
	ruleTransfer = "no transfer member of the client's reaches an engine"
	ruleClientID = "the client's request id names nothing"
	ruleIDs      = "both legs carry one id, new with each attempt"
	ruleEqual    = "equal sessions give equal legs, whatever runs beside them"
	ruleBorrowed = "the client's body and the engines' responses are neither changed nor kept"
)

var legFaults = []Fault{
	decodes(ruleLegs, "writes a member that is not JSON", sets(connector.ParamsMember, `{"a":}`)),
	prefills(ruleLegs, "sets a header of the transport's", setsHeader("Content-Length", "3")),
	prefills(ruleLegs, "sets a header that ends early", setsHeader("X-Toy", "a\r\nX-Other: b")),
	decodes(ruleLegs, "sets a path that is none", func(_ *connector.Session, leg *connector.Leg) {
		leg.SetPath("v1/completions")
	}),
	with(ruleLegs, "fails at every request", func(f *faulty) {
		f.prefill = func(*connector.Session, *connector.Leg) error { return names.ErrUnknown }
	}),

	prefills(ruleLimit, "asks for two tokens", func(_ *connector.Session, leg *connector.Leg) { leg.LimitTokens(2) }),
	prefills(ruleLimit, "leaves the limit that wins", keeps("max_completion_tokens")),
	prefills(ruleLimit, "leaves the minimum above the limit", keeps("min_tokens")),
	prefills(ruleLimit, "forgets where an API keeps its limit", func(s *connector.Session, leg *connector.Leg) {
		if s.API == connector.APIResponses {
			leg.Delete("max_output_tokens")
			leg.Set("max_tokens", raw("1"))
		}
	}),

	prefills(ruleWhole, "leaves the stream", keeps("stream")),
	prefills(ruleWhole, "leaves the stream's options", keeps("stream_options")),
	prefills(ruleWhole, "leaves several choices", keeps("n")),
	prefills(ruleWhole, "leaves log probabilities", keeps("logprobs")),

	prefills(rulePrefill, "sets the temperature", sets("temperature", "0")),
	prefills(rulePrefill, "drops what it does not know", drops("x_unknown")),
	prefills(rulePrefill, "drops sampling members that it does not know",
		func(s *connector.Session, leg *connector.Leg) {
			if s.API == connector.APIGenerate {
				leg.Set("sampling_params", raw(`{"max_tokens":1}`))
			}
		}),

	decodes(ruleDecode, "sends the body through a map", func(_ *connector.Session, leg *connector.Leg) {
		var m map[string]any
		body, err := contract.Body(leg)
		if err == nil && json.Unmarshal(body, &m) == nil {
			if again, err := json.Marshal(m); err == nil {
				leg.SetBody(again)
			}
		}
	}),
	decodes(ruleDecode, "adds a member of its own that nobody was told of", sets("return_token_ids", "true")),
	decodes(ruleDecode, "takes the client's stream away", func(_ *connector.Session, leg *connector.Leg) {
		leg.NoStream()
	}),
	decodes(ruleDecode, "writes a number as a float", func(s *connector.Session, leg *connector.Leg) {
		if _, ok := s.Field("seed"); ok {
			leg.Set("seed", raw("9007199254740992"))
		}
	}),
	decodes(ruleDecode, "repeats a text without its escapes", func(s *connector.Session, leg *connector.Leg) {
		var text string
		if v, ok := s.Field("x_escaped"); ok && json.Unmarshal(v, &text) == nil {
			leg.Set("x_escaped", connector.Quote(text))
		}
	}),
	decodes(ruleDecode, "writes the body without its white space", func(_ *connector.Session, leg *connector.Leg) {
		if body, err := contract.Body(leg); err == nil {
			var again bytes.Buffer
			if json.Compact(&again, body) == nil {
				leg.SetBody(again.Bytes())
			}
		}
	}),

	decodes(ruleTransfer, "believes the client's transfer members", keeps(connector.ParamsMember)),
	prefills(ruleTransfer, "believes those inside vllm_xargs", keeps("vllm_xargs")),
	decodes(ruleTransfer, "believes the request id in the body", keeps("request_id")),

	prefills(ruleClientID, "names the transfer by the client's id in a member",
		func(s *connector.Session, leg *connector.Leg) {
			leg.Param("client_id", connector.Quote(s.RequestID))
		}),
	decodes(ruleClientID, "names the transfer by the client's id in a header",
		func(s *connector.Session, leg *connector.Leg) {
			leg.SetHeader("X-Transfer-Id", "toy-"+s.RequestID)
		}),
}

// transferID makes a fault that declares ids of its own, and gives both legs wrong ones.
func transferID(what string, prefill, decode func(s *connector.Session) string) Fault {
	set := func(id func(*connector.Session) string) func(*connector.Session, *connector.Leg) {
		return func(s *connector.Session, leg *connector.Leg) { leg.SetRequestID(id(s)) }
	}
	return sends(ruleIDs, what, saysOwnID, set(prefill), set(decode))
}

func constant(*connector.Session) string { return "transfer-1" }

func ofTheRequest(s *connector.Session) string { return fmt.Sprintf("%p", s.Request) }

var idFaults = []Fault{
	transferID("names every transfer alike", constant, constant),
	transferID("names the legs differently", func(s *connector.Session) string { return "p-" + s.ID },
		func(s *connector.Session) string { return "d-" + s.ID }),
	transferID("names a request's attempts alike", ofTheRequest, ofTheRequest),

	with(ruleEqual, "counts its sessions", func(f *faulty) {
		var n atomic.Int64
		f.prefill = func(s *connector.Session, leg *connector.Leg) error {
			leg.SetHeader("X-Toy", strconv.FormatInt(n.Add(1), 10))
			return f.rightPrefill(s, leg)
		}
	}),
	with(ruleEqual, "keeps the session between its legs", func(f *faulty) {
		var mu sync.Mutex
		var last string
		f.prefill = func(s *connector.Session, leg *connector.Leg) error {
			mu.Lock()
			last = s.ID
			mu.Unlock()
			return f.rightPrefill(s, leg)
		}
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			for range 100 { // a moment in which another session may come
				mu.Lock()
				if last != s.ID {
					leg.SetHeader("X-Toy", last)
					mu.Unlock()
					break
				}
				mu.Unlock()
			}
			return f.right(s, p, leg)
		}
	}),
	with(ruleEqual, "fails where one transfer runs already", func(f *faulty) {
		var mu sync.Mutex
		seen := map[string]bool{}
		f.prefill = func(s *connector.Session, leg *connector.Leg) error {
			mu.Lock()
			defer mu.Unlock()
			if seen[s.ID] {
				return connector.ErrNoTransfer
			}
			seen[s.ID] = true
			return f.rightPrefill(s, leg)
		}
	}),

	prefills(ruleBorrowed, "writes into the client's body", func(s *connector.Session, _ *connector.Leg) {
		if i := strings.Index(string(s.Request.Body()), "planted"); i >= 0 {
			s.Request.Body()[i] = 'K'
		}
	}),
	with(ruleBorrowed, "writes into P's response", func(f *faulty) {
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			err := f.right(s, p, leg)
			if p != nil && len(p.Body) > 0 {
				p.Body[len(p.Body)-1] = ' '
			}
			return err
		}
	}),
	with(ruleBorrowed, "keeps a part of the client's body for later requests", func(f *faulty) {
		var once sync.Once
		var model json.RawMessage
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			once.Do(func() { model, _ = s.Field("model") })
			leg.SetHeader("X-Toy-Model", string(model))
			return f.Toy.Decode(context.Background(), s, p, leg)
		}
	}),
}
