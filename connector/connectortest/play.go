// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
)

// played is one session's legs as the engines would get them.
type played struct {
	s       *connector.Session
	prefill sent
	decode  sent
	first   *sent  // decode's first try, where decode comes first
	encode  []sent // one for each item of an encode stage

	response Response // P's, as it came
	final    bool     // it was the client's
	n        int      // the session's number
}

// sent is one leg.
type sent struct {
	path   string
	header []contract.Header
	body   []byte
}

func (p *played) legs() map[string]sent {
	m := map[string]sent{"prefill": p.prefill, "decode": p.decode}
	if p.first != nil {
		m["decode's first try"] = *p.first
	}
	for i, leg := range p.encode {
		m[fmt.Sprintf("encode %d", i)] = leg
	}
	return m
}

// means are the other side of a session, to be replaced by hostile ones.
type means struct {
	call    connector.Caller
	encoded func(s *connector.Session, i connector.Item) json.RawMessage
	respond func(s *connector.Session, prefill []byte) Response
	event   func(s *connector.Session) connector.Event
	quiet   bool // no event is expected: what the connector listens on has not been started
}

func (t *trial) means() means {
	respond := func(s *connector.Session, prefill []byte) Response {
		var r Response
		if t.Response != nil {
			r = t.Response(s, prefill)
		}
		return r.fill(t.traits.Handoff, s.API)
	}
	return means{call: t.Call, encoded: t.Encoded, respond: respond, event: t.Event}
}

// play runs a session as package pdflow does. The error is the connector's; panics are errors that [panicked] tells.
func (t *trial) play(s *connector.Session) (*played, error) { return t.playWith(s, t.means()) }

func (t *trial) playWith(s *connector.Session, m means) (p *played, err error) {
	p = &played{s: s}
	err = guard(func() (err error) {
		if p.encode, err = t.before(s, m); err != nil {
			return err
		}
		if e, ok := connector.As[connector.Expecter](t.c); ok && !m.quiet {
			if _, done := e.Expect(s); done != nil {
				defer func() { done(err) }()
			}
		}
		return t.both(p, m)
	})
	return p, err
}

// before is what comes before the legs: a side call, an encode stage.
func (t *trial) before(s *connector.Session, m means) (encode []sent, err error) {
	if pr, ok := connector.As[connector.Preparer](t.c); ok {
		v, err := pr.Prepare(t.ctx, s, t.caller(m.call))
		if err != nil {
			return nil, fmt.Errorf("calling Prepare: %w", err)
		}
		s.Prepared = v
	}
	enc, ok := connector.As[connector.Encoder](t.c)
	if !ok {
		return nil, nil
	}
	items := enc.Items(s)
	if len(items) == 0 {
		return nil, nil
	}
	responses := make([]json.RawMessage, 0, len(items))
	for _, i := range items {
		leg, err := describe(contract.NewLeg(s.Request),
			func(leg *connector.Leg) error { return enc.Encode(s, i, leg) })
		if err != nil {
			return nil, fmt.Errorf("calling Encode: %w", err)
		}
		encode = append(encode, leg)
		response := json.RawMessage(responseTexts[connector.APIChat])
		if m.encoded != nil {
			response = m.encoded(s, i)
		}
		responses = append(responses, response)
	}
	if err := enc.Merge(s, responses); err != nil {
		return nil, fmt.Errorf("calling Merge: %w", err)
	}
	return encode, nil
}

func (t *trial) caller(call connector.Caller) connector.Caller {
	return func(r *http.Request) (*http.Response, error) {
		t.mu.Lock()
		t.calls = append(t.calls, r.URL.String())
		t.mu.Unlock()
		if call == nil {
			return nil, errors.New("connectortest: the harness has no Call")
		}
		return call(r)
	}
}

// both describes the legs in the connector's order.
func (t *trial) both(p *played, m means) error {
	event := func() {
		if m.event != nil {
			p.s.Event = m.event(p.s)
		}
	}
	switch t.order {
	case connector.Together:
		if err := t.decodeLeg(p, nil); err != nil {
			return err
		}
		_, err := t.prefillLeg(p, m)
		return err
	case connector.DecodeThenPrefill:
		if err := t.decodeLeg(p, nil); err != nil {
			return err
		}
		event()
		_, err := t.prefillLeg(p, m)
		return err
	case connector.DecodeFirst:
		if err := t.decodeLeg(p, nil); err != nil {
			return err
		}
		first := p.decode
		p.first = &first
	}
	result, err := t.prefillLeg(p, m)
	if err != nil {
		return err
	}
	if f, ok := connector.As[connector.Finisher](t.c); ok {
		if _, p.final = f.Final(p.s, result); p.final {
			return nil
		}
	}
	event()
	return t.decodeLeg(p, result)
}

// prefillLeg describes prefill and reads P's response.
func (t *trial) prefillLeg(p *played, m means) (result *connector.PrefillResult, err error) {
	p.prefill, err = describe(contract.NewPrefillLeg(p.s.Request, &t.traits),
		func(leg *connector.Leg) error { return t.c.Prefill(t.ctx, p.s, leg) })
	if err != nil {
		return nil, fmt.Errorf("calling Prefill: %w", err)
	}
	p.response = m.respond(p.s, p.prefill.body)
	result = p.response.result()
	if checker, ok := connector.As[connector.PrefillChecker](t.c); ok {
		if err := checker.CheckPrefill(p.s, result); err != nil {
			return nil, fmt.Errorf("CheckPrefill: %w", err)
		}
	}
	return result, nil
}

func (t *trial) decodeLeg(p *played, result *connector.PrefillResult) (err error) {
	p.decode, err = describe(contract.NewLeg(p.s.Request),
		func(leg *connector.Leg) error { return t.c.Decode(t.ctx, p.s, result, leg) })
	if err != nil {
		return fmt.Errorf("calling Decode: %w", err)
	}
	return nil
}

// describe makes a leg and takes it as it would be sent.
func describe(leg *connector.Leg, edit func(*connector.Leg) error) (sent, error) {
	if err := edit(leg); err != nil {
		return sent{}, err
	}
	body, err := contract.Body(leg)
	if err != nil {
		return sent{}, err
	}
	return sent{contract.Path(leg), contract.Leg(leg).Headers, body}, nil
}

// canceled is a context that has ended.
func canceled(parent context.Context) context.Context {
	ctx, cancel := context.WithCancel(parent)
	cancel()
	return ctx
}

// each plays every sample of every API with a session of its own. A sample that the protocol does not carry is left
// out; that the ones that it must carry are not is the affair of another rule.
func (t *trial) each(list func(connector.API) []sample, check func(s sample, p *played) error) error {
	n := 0
	for _, api := range t.apis {
		for _, smp := range append(list(api), t.media(api)...) {
			n++
			r := request(smp)
			if t.unsupported(r) != "" {
				continue
			}
			p, err := t.play(t.session(r, n))
			if err != nil {
				return fmt.Errorf("%s: %w", smp, err)
			}
			p.n = n
			if err := check(smp, p); err != nil {
				return fmt.Errorf("%s: %w", smp, err)
			}
		}
	}
	return nil
}

// again plays a session of t.each once more, with other means.
func (t *trial) again(p *played, m means) (*played, error) {
	return t.playWith(t.session(p.s.Request, p.n), m)
}

// media are chats with media, for connectors that have them encoded.
func (t *trial) media(api connector.API) []sample {
	if _, ok := connector.As[connector.Encoder](t.c); !ok || api != connector.APIChat {
		return nil
	}
	return []sample{{api, "with media", `{"model":"` + modelName +
		`","messages":[{"role":"user","content":[{"type":"text","text":` + promptText + `},` + picture("QUFB") + `,` +
		picture("QkJC") + `,` + picture("QUFB") + `]}],` + others + `}`}}
}

func picture(data string) string {
	return `{"type":"image_url","image_url":{"url":"data:image/png;base64,` + data + `"}}`
}

// all are samples and several.
func all(api connector.API) []sample { return append(samples(api), several(api)...) }
