// SPDX-License-Identifier: Apache-2.0

package states

import (
	"slices"
	"strings"
	"testing/synctest"

	"github.com/pdkit/pdkit/pdflow"
)

// move is one step of a run: a leg goes on ("P", "D"), nothing can and the clock goes on ("~"), or an event happens
// ("!" and its name).
type move string

const waits move = "~"

func (e *event) move() move {
	if e.role != "" {
		return move("!" + e.role + " " + e.name)
	}
	return move("!" + e.name)
}

var byMove = func() map[move]*event {
	m := map[move]*event{}
	for _, e := range events {
		m[e.move()] = e
	}
	return m
}()

// path is a run of one request.
type path struct {
	scenario scenario
	entrance string
	stream   bool
	moves    []move // its beginning; then the lead goes first
	lead     string
	turns    int    // how many steps the lead goes before the other one; 0: all
	repeats  *event // an event of an engine that happens again whenever a leg is at within
	within   point
	attempts int
	coupled  bool // where both legs run at one time, D goes on only with P's KV, as a D without any of its own
}

// ready are the legs that can go on.
func (p *path) ready(waiting []*leg) []*leg {
	if !p.coupled || !p.scenario.beside() {
		return waiting
	}
	return slices.DeleteFunc(slices.Clone(waiting), func(l *leg) bool {
		last := atCompute
		if p.scenario.asks {
			last = atAsked
		}
		return l.role == decodeRole && l.at == last && !l.w.computed(l.room)
	})
}

// goesOn reports whether a run goes on after the client's end: while a leg of P's runs on, unless D leads. Then P never
// answers, and the leg's limit ends it.
func (p *path) goesOn(waiting []*leg) bool {
	return p.scenario.finishes && p.lead == prefillRole && len(waiting) > 0
}

// computed reports whether P has computed a session's prompt.
func (w *world) computed(room string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.legs, func(l *leg) bool {
		return l.role == prefillRole && l.room == room && (l.at == atHead || l.at == atFirst) && !l.failed
	})
}

// seen is a moment of a run in which everything waits.
type seen struct {
	waiting  string // the roles and points of the legs that wait
	first    bool   // the client has the first byte
	told     string // what the client got, if it has its whole response; P runs on
	possible []*event
}

// record is what came of a run.
type record struct {
	moves    []move
	states   []seen // before each of the moves
	told     string
	code     pdflow.Code // of the last attempt's outcome
	attempts int
	engines  []string // the end of each leg
	strange  string   // the run did not follow its path
}

// follow runs a path in a world.
func (p *path) follow(w *world) (r record) {
	c := w.start(p.entrance, p.stream, true)
	grants := 0
	for n := 0; ; n++ {
		synctest.Wait()
		waiting := w.waiting()
		if c.isOver() && n >= len(p.moves) && !p.goesOn(waiting) {
			break
		}
		r.states = append(r.states, p.state(w, c, waiting))
		var m move
		if n < len(p.moves) {
			m = p.moves[n]
		} else {
			m = p.choose(c, waiting, p.ready(waiting), &grants)
		}
		r.moves = append(r.moves, m)
		if why := w.perform(c, m, waiting, p.ready(waiting)); why != "" {
			if n < len(p.moves) {
				r.strange = why
			} else {
				w.breach("%s", why)
			}
			break
		}
		if n > 200 {
			w.breach("the run has no end")
			break
		}
	}
	if !c.isOver() {
		c.leave(errStrange)
	}
	synctest.Wait()
	r.told = c.told()
	w.ledger.mu.Lock()
	list := w.requests[c.id()]
	if r.attempts = len(list); r.attempts > 0 && list[r.attempts-1].out.Err != nil {
		r.code = list[r.attempts-1].out.Err.Code
	}
	w.ledger.mu.Unlock()
	for _, role := range []string{prefillRole, decodeRole} { // which of two legs connects first is chance
		var fates []string
		for _, l := range w.legs {
			if l.host != "" && l.role == role {
				fates = append(fates, l.fate())
			}
		}
		if len(fates) > 0 {
			r.engines = append(r.engines, role+" "+strings.Join(fates, ", "))
		}
	}
	return r
}

var errStrange = strangeError{}

type strangeError struct{}

func (strangeError) Error() string { return "the run ends here" }

func (p *path) state(w *world, c *client, waiting []*leg) seen {
	names := make([]string, 0, len(waiting))
	for _, l := range waiting {
		names = append(names, l.role+" "+string(l.at))
	}
	slices.Sort(names)
	s := seen{waiting: strings.Join(names, ", ")}
	w.ledger.mu.Lock()
	s.first = c.first > 0
	w.ledger.mu.Unlock()
	if c.isOver() {
		s.told = c.told()
	}
	for _, e := range events {
		if _, ok := e.on(waiting, c); ok {
			s.possible = append(s.possible, e)
		}
	}
	return s
}

// choose is how a run goes on by itself: the lead for its turns, then the other one as far as it can, then the lead.
func (p *path) choose(c *client, waiting, ready []*leg, grants *int) move {
	if p.repeats != nil {
		if l, ok := p.repeats.on(waiting, c); ok && l != nil && l.at == p.within {
			return p.repeats.move()
		}
	}
	if len(ready) == 0 {
		return waits
	}
	has := func(role string) bool {
		return slices.ContainsFunc(ready, func(l *leg) bool { return l.role == role })
	}
	other := prefillRole
	if p.lead == prefillRole {
		other = decodeRole
	}
	if has(p.lead) && (p.turns == 0 || *grants < p.turns || !has(other)) {
		*grants++
		return move(p.lead)
	}
	return move(other)
}

// perform does a move, or says why it cannot.
func (w *world) perform(c *client, m move, waiting, ready []*leg) (why string) {
	switch e := byMove[m]; {
	case m == waits:
		if len(ready) > 0 {
			return "legs wait, and the path waits for none"
		}
		select { // what is left from before
		case <-w.changed:
		default:
		}
		if !w.idle() {
			return "the request does not end: " + c.entrance
		}
	case e == nil:
		i := slices.IndexFunc(ready, func(l *leg) bool { return l.role == string(m) })
		if i < 0 {
			return "no leg waits that the path lets go on"
		}
		ready[i].let(nil)
	default:
		l, ok := e.on(waiting, c)
		if !ok {
			return "the event cannot happen here"
		}
		if l != nil {
			l.let(&e.fault)
		} else {
			e.do(c)
		}
	}
	return ""
}

// fate is how a leg ended, for operators.
func (l *leg) fate() string {
	switch {
	case l.failed:
		return "failed"
	case l.served:
		return "answered"
	case l.got:
		return "cancelled"
	}
	return "not sent"
}
