// SPDX-License-Identifier: Apache-2.0

package wrong

import (
	"bytes"
	"encoding/json"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
)

const (
	ruleFinal   = "a response that P has finished is whole, and tells the client nothing of the transfer"
	ruleRewrite = "a response of D's that is rewritten keeps its text"
)

// finals makes a fault that alters a response that is final.
func finals(what string, alter func(p *connector.PrefillResult, a *connector.Response)) Fault {
	return with(ruleFinal, what, func(f *faulty) {
		f.final = func(s *connector.Session, p *connector.PrefillResult) (connector.Response, bool) {
			a, ok := f.Toy.Final(s, p)
			if ok {
				alter(p, &a)
			}
			return a, ok
		}
	})
}

// rewrites makes a fault that alters what becomes of D's responses.
func rewrites(what string, alter func(data []byte) []byte) Fault {
	return with(ruleRewrite, what, func(f *faulty) {
		f.rewrite = func(*connector.Session, func() *connector.PrefillResult) func([]byte) ([]byte, error) {
			return func(data []byte) ([]byte, error) { return alter(data), nil }
		}
	})
}

var clientFaults = []Fault{
	finals("gives the client P's response as it is", func(p *connector.PrefillResult, a *connector.Response) {
		a.Body = p.Body
	}),
	finals("streams what P answered, in several lines", func(p *connector.PrefillResult, a *connector.Response) {
		var lines bytes.Buffer
		if len(a.Events) > 0 && json.Indent(&lines, a.Events[0], "", " ") == nil {
			a.Events[0] = lines.Bytes()
		}
	}),
	finals("does not end the stream", func(_ *connector.PrefillResult, a *connector.Response) {
		if len(a.Events) > 0 {
			a.Events = a.Events[:1]
		}
	}),
	finals("gives no stream to a client that wants one", func(p *connector.PrefillResult, a *connector.Response) {
		a.Events = nil
	}),

	rewrites("drops what it does not know", func([]byte) []byte { return nil }),
	rewrites("cuts", func(data []byte) []byte { return data[:len(data)/2] }),
	rewrites("empties the text", func(data []byte) []byte { return bytes.ReplaceAll(data, []byte("beta-text"), nil) }),
	with(ruleRewrite, "panics without P's response", func(f *faulty) {
		f.rewrite = func(_ *connector.Session, p func() *connector.PrefillResult) func([]byte) ([]byte, error) {
			return func(data []byte) ([]byte, error) {
				if p().Status == 0 {
					return nil, names.ErrUnknown
				}
				return data, nil
			}
		}
	}),

	with(ruleHostile, "panics at an encode engine's response", func(f *faulty) {
		f.merge = func(responses []json.RawMessage) error {
			_ = responses[0][0]
			return nil
		}
	}),
	with(ruleLegs, "asks an encode engine for what is not JSON", func(f *faulty) {
		f.encode = func(_ *connector.Session, _ connector.Item, leg *connector.Leg) error {
			leg.SetBody(raw(`{"messages":[,]}`))
			return nil
		}
	}),
	with(ruleClientID, "names an encode leg by the client's id", func(f *faulty) {
		f.encode = func(s *connector.Session, i connector.Item, leg *connector.Leg) error {
			leg.SetHeader("X-Toy", s.RequestID)
			return f.Toy.Encode(s, i, leg)
		}
	}),
	with(ruleLimit, "normalizes by itself, and leaves a thinking budget above the limit", func(f *faulty) {
		f.traits = func(t *connector.Traits) { t.RawPrefill = true }
		f.prefill = func(s *connector.Session, leg *connector.Leg) error {
			leg.LimitTokens(1)
			leg.NoStream()
			return f.rightPrefill(s, leg)
		}
	}),
}
