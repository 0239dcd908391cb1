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
	"slices"
	"strings"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
)

// needs are the parts of an answer that must be there.
func (t *trial) needs(good []byte) []string {
	if t.Needs != nil {
		return t.Needs
	}
	var list []string
	for _, name := range transferMembers {
		if gjson.GetBytes(good, name).Exists() {
			list = append(list, name)
		}
	}
	return list
}

// giving is the harness's other side with one answer of P's.
func (t *trial) giving(answer []byte) means {
	m := t.means()
	m.answer = func(*connector.Session, []byte) []byte { return answer }
	return m
}

func checkBadAnswers(t *trial) error {
	if t.Answer == nil && t.BadAnswers == nil {
		return notApplicable("decode reads nothing of P's answer, as the harness says")
	}
	for i, api := range t.APIs {
		r, err := request(plain(api))
		if err != nil {
			return err
		}
		p, err := t.play(t.session(r, 4000+i))
		if err != nil {
			return fmt.Errorf("%s: %w", api, err)
		}
		var bad []mutant
		if t.Answer != nil {
			needs := t.needs(p.answer)
			if len(needs) == 0 {
				return errors.New("the harness: its Answer has no transfer member at the top level, so Needs must say what decode reads")
			}
			bad = wholes(p.answer)
			for _, path := range needs {
				if !gjson.GetBytes(p.answer, path).Exists() {
					return fmt.Errorf("the harness: its Answer to %s has no %s, which Needs names", api, path)
				}
				bad = append(bad, spoil(p.answer, path)...)
			}
		}
		for n, body := range t.BadAnswers {
			bad = append(bad, mutant{fmt.Sprintf("it is BadAnswers[%d]", n), body})
		}
		for _, b := range bad {
			if err := t.refuses(r, 4000+i, b); err != nil {
				return fmt.Errorf("%s: %w", api, err)
			}
		}
	}
	return t.refusesNone()
}

func (t *trial) refuses(r *connector.Request, n int, b mutant) error {
	_, err := t.playWith(t.session(r, n), t.giving(b.body))
	switch {
	case err == nil:
		return fmt.Errorf("an answer in which %s became a decode leg", b.what)
	case panicked(err):
		return fmt.Errorf("an answer in which %s: %w", b.what, err)
	}
	return nil
}

// refusesNone describes decode without an answer, which an order that has one never does.
func (t *trial) refusesNone() error {
	if t.traits.Order != connector.PrefillThenDecode {
		return nil
	}
	r, err := request(plain(t.APIs[0]))
	if err != nil {
		return err
	}
	_, err = describe(t.session(r, 4999), func(leg *connector.Leg) error {
		return guard(func() error { return t.c.Decode(t.ctx, t.session(r, 4999), nil, leg) })
	})
	if panicked(err) {
		return fmt.Errorf("describing decode before prefill answered: %w", err)
	}
	if err == nil && t.Answer != nil {
		return errors.New("describing decode before prefill answered gave a leg")
	}
	return nil
}

// bigInteger fits no float64, and nothing of 64 bits.
const bigInteger = "9007199254740993123456789"

func checkHandoffKeeps(t *trial) error {
	if t.Answer == nil {
		return notApplicable("decode reads nothing of P's answer, as the harness says")
	}
	for i, api := range t.APIs {
		r, err := request(plain(api))
		if err != nil {
			return err
		}
		p, err := t.play(t.session(r, 5000+i))
		if err != nil {
			return fmt.Errorf("%s: %w", api, err)
		}
		for _, holder := range holders(p.answer, t.needs(p.answer)) {
			more := p.answer
			for key, raw := range map[string]string{"x_big": bigInteger, "x_small": "1.50", "x_more": `{"a":[null,"\u0061",1e3]}`} {
				if more, err = sjson.SetRawBytes(more, holder+"."+key, []byte(raw)); err != nil {
					return err
				}
			}
			q, err := t.playWith(t.session(r, 5000+i), t.giving(more))
			if err != nil {
				return fmt.Errorf("%s: an answer with further keys in %s: %w", api, holder, err)
			}
			for key, raw := range map[string]string{"x_big": bigInteger, "x_small": "1.50", "x_more": `{"a":[null,"\u0061",1e3]}`} {
				if bytes.Contains(q.decode.body, []byte(`"`+key+`"`)) && !bytes.Contains(q.decode.body, []byte(raw)) {
					return fmt.Errorf("%s: the handoff's %s did not keep its spelling", api, key)
				}
			}
		}
	}
	return nil
}

// holders are the objects that hold what must be there.
func holders(answer []byte, needs []string) []string {
	var list []string
	for _, path := range needs {
		for path != "" && !gjson.GetBytes(answer, path).IsObject() {
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
	for i, api := range t.APIs {
		r, err := request(plain(api))
		if err != nil {
			return err
		}
		p, err := t.play(t.session(r, 6000+i))
		if err != nil {
			return fmt.Errorf("%s: %w", api, err)
		}
		bad := wholes(p.answer)
		for _, path := range paths(gjson.ParseBytes(p.answer), "", nil) {
			bad = append(bad, spoil(p.answer, path)...)
		}
		for _, b := range bad {
			if err := t.survives(r, 6000+i, t.giving(b.body)); err != nil {
				return fmt.Errorf("%s, P's answer: %s: %w", api, b.what, err)
			}
			if err := t.readers(t.session(r, 6000+i), b.body); err != nil {
				return fmt.Errorf("%s, an engine's answer: %s: %w", api, b.what, err)
			}
		}
		if err := t.hostileEvents(r, 6000+i); err != nil {
			return fmt.Errorf("%s: %w", api, err)
		}
		if err := t.hostileEncodes(api, 6000+i); err != nil {
			return err
		}
	}
	return t.hostileCalls()
}

// survives plays a session that may fail, and checks what comes of it if it does not.
func (t *trial) survives(r *connector.Request, n int, m means) error {
	p, err := t.playWith(t.session(r, n), m)
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
	return same(r, p.decode.body, t.own())
}

// readers shows a body to the abilities that read an engine's answer: a panic is an error.
func (t *trial) readers(s *connector.Session, body []byte) error {
	result := connector.NewPrefillResult(http.StatusOK, nil, body, began)
	return guard(func() error {
		if f, ok := connector.As[connector.Finisher](t.c); ok {
			f.Final(s, result)
		}
		if c, ok := connector.As[connector.ColdDetector](t.c); ok {
			for _, status := range []int{200, 500, 503} {
				c.Cold(s, status, body)
			}
		}
		if w, ok := connector.As[connector.Rewriter](t.c); ok {
			for _, p := range []*connector.PrefillResult{result, nil} {
				fn := w.Rewrite(s, func() *connector.PrefillResult { return p })
				if fn == nil {
					continue
				}
				for range 3 {
					_, _ = fn(body) // an error is as good
				}
			}
		}
		return nil
	})
}

func (t *trial) hostileEvents(r *connector.Request, n int) error {
	if t.Event == nil {
		return nil
	}
	good := t.Event(t.session(r, n)).Body
	bad := wholes(good)
	for _, path := range paths(gjson.ParseBytes(good), "", nil) {
		bad = append(bad, spoil(good, path)...)
	}
	for _, b := range bad {
		m := t.means()
		m.event = func(*connector.Session) connector.Event { return connector.Event{Body: b.body, At: began} }
		if err := t.survives(r, n, m); err != nil {
			return fmt.Errorf("an event: %s: %w", b.what, err)
		}
	}
	return nil
}

// hostileEncodes has encode engines answer badly.
func (t *trial) hostileEncodes(api connector.API, n int) error {
	for _, smp := range t.media(api) {
		r, err := request(smp)
		if err != nil {
			return err
		}
		p, err := t.play(t.session(r, n))
		if err != nil {
			return fmt.Errorf("%s: %w", smp, err)
		}
		if len(p.encode) == 0 {
			continue // of a connector that has other media encoded
		}
		good := Answer(connector.APIChat)
		if t.Encoded != nil {
			enc, _ := connector.As[connector.Encoder](t.c)
			s := t.session(r, n)
			good = t.Encoded(s, enc.Items(s)[0])
		}
		bad := wholes(good)
		for _, path := range paths(gjson.ParseBytes(good), "", nil) {
			bad = append(bad, spoil(good, path)...)
		}
		for _, b := range bad {
			m := t.means()
			m.encoded = func(*connector.Session, connector.Item) json.RawMessage { return b.body }
			if err := t.survives(r, n, m); err != nil {
				return fmt.Errorf("%s, an encode engine's answer: %s: %w", smp, b.what, err)
			}
		}
	}
	return nil
}

// hostileCalls answers side calls badly. Each trial has a connector of its own, since a good answer may be kept.
func (t *trial) hostileCalls() error {
	if _, ok := connector.As[connector.Preparer](t.c); !ok {
		return nil
	}
	r, err := request(plain(t.APIs[0]))
	if err != nil {
		return err
	}
	var bad []mutant
	for _, b := range t.callAnswers(r) {
		bad = append(append(bad, mutant{"it is good, but has status 500", b}), wholes(b)...)
		for _, path := range paths(gjson.ParseBytes(b), "", nil) {
			bad = append(bad, spoil(b, path)...)
		}
	}
	for _, b := range bad {
		err := t.anew(func(u *trial) error {
			m := u.means()
			m.call = func(*http.Request) (*http.Response, error) { return reply(b), nil }
			return u.survives(r, 6900, m)
		})
		if err != nil {
			return fmt.Errorf("a side call's answer: %s: %w", b.what, err)
		}
	}
	return nil
}

func reply(b mutant) *http.Response {
	status := http.StatusOK
	if strings.HasSuffix(b.what, "status 500") {
		status = http.StatusInternalServerError
	}
	return &http.Response{Status: http.StatusText(status), StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(b.body)), ContentLength: int64(len(b.body))}
}

// callAnswers are the harness's good answers to the side calls of a session.
func (t *trial) callAnswers(r *connector.Request) (bodies [][]byte) {
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

// validJSON is json.Valid, for texts.
func validJSON(s string) bool { return json.Valid([]byte(s)) }
