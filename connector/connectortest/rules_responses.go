// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
)

// giving is the harness's other side with one response of P's.
func (t *trial) giving(r Response) means {
	m := t.means()
	m.respond = func(*connector.Session, []byte) Response { return r }
	return m
}

// bad are the responses that must be refused.
func (t *trial) bad(good Response, api connector.API) (list []badResponse, err error) {
	at := t.traits.Handoff
	if at.Header != "" {
		list = good.spoilHeader(at.Header)
	}
	if at.Member != "" {
		bodies := wholes(good.Body)
		for _, key := range append([]string{""}, t.Needs...) {
			path := gjsonPath(strings.TrimSuffix(at.Member+"."+key, "."))
			if !gjson.GetBytes(good.Body, path).Exists() {
				return nil, fmt.Errorf("the harness: its Response to %s has no %s, which Traits' Handoff or Needs name",
					api, path)
			}
			bodies = append(bodies, spoil(good.Body, path)...)
		}
		list = append(list, good.with(bodies)...)
	}
	for n, r := range t.BadResponses {
		list = append(list, badResponse{fmt.Sprintf("it is BadResponses[%d]", n), r.fill(at, api)})
	}
	return list, nil
}

func checkBadResponses(t *trial) error {
	empty := func(b *badResponse) bool {
		return t.traits.Handoff.Member != "" &&
			gjson.GetBytes(b.Body, gjsonPath(t.traits.Handoff.Member)).Raw == "{}"
	}
	err := t.refuses(func(b *badResponse) bool { return !empty(b) })
	if err == nil {
		err = t.refusesNone()
	}
	if err != nil {
		return err
	}
	err = t.excused(t.Except.PassesEmpty, "PassesEmpty", t.refuses(empty))
	if _, excused := errors.AsType[notApplicable](err); excused {
		return nil
	}
	return err
}

// refuses gives the connector those of the bad responses that are of a kind.
func (t *trial) refuses(kind func(*badResponse) bool) error {
	return t.each(plains, func(smp sample, p *played) error {
		bad, err := t.bad(p.response, smp.api)
		if err != nil {
			return err
		}
		if len(bad) == 0 {
			return notApplicable("Traits declares no handoff, and the harness has no BadResponses")
		}
		for _, b := range bad {
			if !kind(&b) {
				continue
			}
			_, err := t.again(p, t.giving(b.Response))
			switch {
			case err == nil:
				return fmt.Errorf("a response in which %s became a decode leg", b.what)
			case panicked(err):
				return fmt.Errorf("a response in which %s: %w", b.what, err)
			}
		}
		return nil
	})
}

// checkUndeclaredHandoff holds a connector that declares no handoff in the body to it: D's leg is the same whatever
// body P sends.
func checkUndeclaredHandoff(t *trial) error {
	if t.traits.Handoff.Member != "" {
		return notApplicable("Traits declares a handoff in the body, with whose other members it may have to agree")
	}
	return t.each(plains, func(smp sample, p *played) (err error) {
		if p.response.Handoff != "" && t.traits.Handoff.Header == "" {
			return errors.New("the harness: its Response has a Handoff, but Traits declares none")
		}
		other := p.response
		if other.Body, err = sjson.DeleteBytes([]byte(responseTexts[smp.api]), "usage"); err != nil {
			return err
		}
		q, err := t.again(p, t.giving(other))
		if err == nil && !reflect.DeepEqual(p.decode, q.decode) {
			err = errors.New("the decode leg is another one")
		}
		if err != nil {
			return fmt.Errorf("its Traits declares no handoff in the body, but with another body of P's: %w", err)
		}
		return nil
	})
}

// refusesNone describes decode without a response, which an order that has one never does.
func (t *trial) refusesNone() error {
	if t.traits.Order != connector.PrefillThenDecode {
		return nil
	}
	r := request(plain(t.apis[0]))
	_, err := describe(contract.NewLeg(r), func(leg *connector.Leg) error {
		return guard(func() error { return t.c.Decode(t.ctx, t.session(r, 4999), nil, leg) })
	})
	if panicked(err) {
		return fmt.Errorf("describing decode before prefill answered: %w", err)
	}
	if err == nil && t.traits.Handoff.Named() {
		return errors.New("describing decode before prefill answered gave a leg")
	}
	return nil
}

// bigInteger fits no float64, and nothing of 64 bits.
const bigInteger = "9007199254740993123456789"

var furtherKeys = map[string]string{"x_big": bigInteger, "x_small": "1.50", "x_more": `{"a":[null,"\u0061",1e3]}`}

func checkHandoffKeeps(t *trial) error {
	if t.traits.Handoff.Member == "" {
		return notApplicable("Traits declares no handoff in a member")
	}
	return t.each(plains, func(_ sample, p *played) (err error) {
		for _, holder := range t.holders(p.response.Body) {
			more := p.response
			for key, raw := range furtherKeys {
				if more.Body, err = sjson.SetRawBytes(more.Body, holder+"."+key, []byte(raw)); err != nil {
					return err
				}
			}
			q, err := t.again(p, t.giving(more))
			if err != nil {
				return fmt.Errorf("a response with further keys in %s: %w", holder, err)
			}
			for key, raw := range furtherKeys {
				if bytes.Contains(q.decode.body, []byte(`"`+key+`"`)) && !bytes.Contains(q.decode.body, []byte(raw)) {
					return fmt.Errorf("the handoff's %s did not keep its spelling", key)
				}
			}
		}
		return nil
	})
}

// holders are the objects of the handoff that hold what must be there.
func (t *trial) holders(body []byte) []string {
	var list []string
	for _, key := range append([]string{""}, t.Needs...) {
		path := gjsonPath(strings.TrimSuffix(t.traits.Handoff.Member+"."+key, "."))
		for path != "" && !gjson.GetBytes(body, path).IsObject() {
			path = path[:max(strings.LastIndexByte(path, '.'), 0)]
		}
		if path != "" && !slices.Contains(list, path) {
			list = append(list, path)
		}
	}
	return list
}

// checkHostile gives the connector whatever an engine may send, in every place where it reads something of an engine.
func checkHostile(t *trial) error {
	err := t.each(plains, func(_ sample, p *played) error {
		bad := p.response.with(hostile(p.response.Body))
		if name := t.traits.Handoff.Header; name != "" {
			bad = slices.Concat(bad, p.response.spoilHeader(name), p.response.oddHeaders(name))
		}
		for _, b := range bad {
			if err := t.survives(p, t.giving(b.Response)); err != nil {
				return fmt.Errorf("a response of P's: %s: %w", b.what, err)
			}
			if err := t.readers(t.session(p.s.Request, p.n), b.Response); err != nil {
				return fmt.Errorf("an engine's response: %s: %w", b.what, err)
			}
		}
		return t.hostileEvents(p)
	})
	if err == nil {
		err = t.each(func(connector.API) []sample { return nil }, t.hostileEncodes) // media alone
	}
	if err != nil {
		return err
	}
	return t.hostileCalls()
}

// hostile are a body made bad as a whole, and at each of its values.
func hostile(good []byte) []mutant {
	bad := wholes(good)
	for _, path := range paths(gjson.ParseBytes(good), "", nil) {
		bad = append(bad, spoil(good, path)...)
	}
	return bad
}

// survives plays a session again that may fail, and checks what comes of it if it does not.
func (t *trial) survives(was *played, m means) error {
	p, err := t.again(was, m)
	if err != nil {
		if panicked(err) {
			return err
		}
		return nil
	}
	if p.final {
		return nil
	}
	if err := wellFormed(p.decode); err != nil {
		return fmt.Errorf("the decode leg: %w", err)
	}
	return same(p.s.Request, p.decode.body, t.own())
}

// readers shows a response to the abilities that read an engine's: a panic is an error.
func (t *trial) readers(s *connector.Session, r Response) error {
	result := r.result()
	return guard(func() error {
		if f, ok := connector.As[connector.Finisher](t.c); ok {
			f.Final(s, result)
		}
		if c, ok := connector.As[connector.ColdDetector](t.c); ok {
			for _, status := range []int{200, 500, 503} {
				c.Cold(s, status, r.Body)
			}
		}
		if w, ok := connector.As[connector.Rewriter](t.c); ok {
			for _, p := range []*connector.PrefillResult{result, nil} {
				fn := w.Rewrite(s, func() *connector.PrefillResult { return p })
				if fn == nil {
					continue
				}
				for range 3 {
					_, _ = fn(r.Body) // an error is as good
				}
			}
		}
		return nil
	})
}

func (t *trial) hostileEvents(p *played) error {
	if t.Event == nil {
		return nil
	}
	for _, b := range hostile(t.Event(p.s).Body) {
		m := t.means()
		m.event = func(*connector.Session) connector.Event { return connector.Event{Body: b.body, At: began} }
		if err := t.survives(p, m); err != nil {
			return fmt.Errorf("an event: %s: %w", b.what, err)
		}
	}
	return nil
}

// hostileEncodes has encode engines respond badly.
func (t *trial) hostileEncodes(_ sample, p *played) error {
	if len(p.encode) == 0 {
		return nil // of a connector that has other media encoded
	}
	good := []byte(responseTexts[connector.APIChat])
	if t.Encoded != nil {
		enc, _ := connector.As[connector.Encoder](t.c)
		good = t.Encoded(p.s, enc.Items(p.s)[0])
	}
	for _, b := range hostile(good) {
		m := t.means()
		m.encoded = func(*connector.Session, connector.Item) json.RawMessage { return b.body }
		if err := t.survives(p, m); err != nil {
			return fmt.Errorf("an encode engine's response: %s: %w", b.what, err)
		}
	}
	return nil
}

// hostileCalls answers side calls badly. Each trial has a connector of its own, since a good response may be kept.
func (t *trial) hostileCalls() error {
	if _, ok := connector.As[connector.Preparer](t.c); !ok {
		return nil
	}
	r := request(plain(t.apis[0]))
	var bad []mutant
	for _, b := range t.callResponses(r) {
		bad = append(append(bad, mutant{"it is good, but has status 500", b}), hostile(b)...)
	}
	for _, b := range bad {
		err := t.anew(func(u *trial) error {
			m := u.means()
			m.call = func(*http.Request) (*http.Response, error) { return b.reply(), nil }
			return u.survives(&played{s: u.session(r, 6900), n: 6900}, m)
		})
		if err != nil {
			return fmt.Errorf("a side call's response: %s: %w", b.what, err)
		}
	}
	return nil
}

// reply is a response to a side call.
func (b mutant) reply() *http.Response {
	if strings.HasSuffix(b.what, "status 500") {
		return reply(http.StatusInternalServerError, b.body)
	}
	return reply(http.StatusOK, b.body)
}

func reply(status int, body []byte) *http.Response {
	return &http.Response{
		Status: http.StatusText(status), StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}},
		Body:   io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)),
	}
}

// callResponses are the harness's good responses to the side calls of a session.
func (t *trial) callResponses(r *connector.ClientRequest) (bodies [][]byte) {
	_ = t.anew(func(u *trial) error {
		m := u.means()
		give := m.call
		m.call = func(req *http.Request) (*http.Response, error) {
			if give == nil {
				return nil, errors.New("connectortest: the harness has no Call")
			}
			resp, err := give(req)
			if err != nil {
				return nil, err
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			u.mu.Lock()
			bodies = append(bodies, body)
			u.mu.Unlock()
			resp.Body = io.NopCloser(bytes.NewReader(body))
			return resp, err
		}
		_, err := u.playWith(u.session(r, 6901), m)
		return err
	})
	return bodies
}

// anew runs something on a new connector.
func (t *trial) anew(run func(u *trial) error) error {
	h := t.Harness
	u, err := h.newTrial(context.WithoutCancel(t.ctx), t.started)
	if err != nil {
		return err
	}
	err = run(u)
	if e := u.end(); err == nil {
		err = e
	}
	return err
}
