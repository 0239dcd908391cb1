// SPDX-License-Identifier: Apache-2.0

package states

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
)

// tokens is how many tokens D makes to a prompt.
const tokens = 5

// rescuesAtOne is how many rescued streams a flow lets one engine prefill at a time (pdflow/internal/rescue/queue.go).
const rescuesAtOne = 4

// idOf is the id of a token of the client n: 0 is its prompt, and D's tokens follow.
func idOf(n, token int) int { return 100*(n+1) + token }

func idsOf(n, from, to int) string {
	var list []string
	for i := from; i < to; i++ {
		list = append(list, strconv.Itoa(idOf(n, i)))
	}
	return "[" + strings.Join(list, ",") + "]"
}

// promptOf returns the client whose prompt an engine got, and how many of D's tokens follow it. With ids it is the
// prompt of a rescue.
func (w *world) promptOf(raw string) (name string, given int) {
	p := gjson.Parse(raw)
	if !p.IsArray() {
		return p.Str, 0
	}
	n, given := int(p.Get("0").Int())/100-1, len(p.Array())-1
	if raw != idsOf(n, 0, given+1) {
		w.breach("a pair is to go on after tokens that no D has made: %s", raw)
	}
	if joined(n) && (given == 2 || given == 3) {
		w.breach("a pair is to go on after an event with several tokens: %s", raw)
	}
	return "client " + strconv.Itoa(n), given
}

// joined reports whether D sends a client's second and third token in one event. After it no other D can go on, so that
// the next one makes both again.
func joined(n int) bool { return n%2 == 0 }

// tokenEvent is an event with D's tokens from one to before another.
func tokenEvent(id string, n, from, to int, reason, promptIDs, ids string) string {
	text := ""
	for i := from; i < to; i++ {
		text += "token " + strconv.Itoa(i) + " of client " + strconv.Itoa(n) + ", "
	}
	return `{"id":"` + id + `","choices":[{"index":0,"text":"` + text + `","finish_reason":` + reason +
		`,"prompt_token_ids":` + promptIDs + `,"token_ids":` + ids + `}]}`
}

// tokenEvents calls f with the tokens of each event from one token to before another.
func tokenEvents(n, from, to int, f func(from, to int, reason string)) {
	for i := from; i < to; {
		next := i + 1
		if i == 2 && joined(n) {
			next++
		}
		reason := "null"
		if next >= to {
			reason = `"length"`
		}
		f(i, next, reason)
		i = next
	}
}

func (c *client) number() int {
	n, _ := strconv.Atoi(strings.TrimPrefix(c.name, "client "))
	return n
}

// tokenStream is what a client gets, with the first engine's id of the response in all events.
func (c *client) tokenStream() string {
	var b strings.Builder
	id := gjson.Get(strings.TrimPrefix(c.body, "data: "), "id").Str
	tokenEvents(c.number(), 1, tokens+1, func(from, to int, reason string) {
		b.WriteString("data: " + tokenEvent(id, c.number(), from, to, reason, "null", "null") + "\n\n")
	})
	return b.String() + "data: [DONE]\n\n"
}

// tokens is what a healthy D says that is asked for token ids. It goes on after those that it was given.
func (l *leg) tokens(limit int) []part {
	c := l.w.clientOf(l.prompt)
	if c == nil || !c.rescuable() {
		l.w.breach("D was asked for token ids, and its stream cannot be rescued")
		return nil
	}
	n, first := c.number(), l.given+1
	parts := []part{{bytes: eventHead, at: atHead}}
	tokenEvents(n, first, first+limit, func(from, to int, reason string) {
		at, promptIDs := atSecond, "null"
		if from == first {
			at, promptIDs = atFirst, idsOf(n, 0, first)
		}
		event := tokenEvent(l.room, n, from, to, reason, promptIDs, idsOf(n, from, to))
		parts = append(parts, part{bytes: chunk(event), at: at, tokens: to - 1})
	})
	return append(parts, part{bytes: chunk("[DONE]"), at: atEnd}, part{bytes: lastChunk})
}

// gave notes that the gateway has read a client's tokens up to the nth.
func (w *world) gave(l *leg, n int) {
	c := w.clientOf(l.prompt)
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	if c != nil && n > c.tokens {
		c.tokens = n
		w.givers[l.room] = l
	}
}

// cutStream returns D's leg with whose stream a further attempt of a client may go on, if there is one: the last that
// gave the client tokens, while some are missing. It is called with ledger.mu, as mayFollow is.
func (w *world) cutStream(c *client, before []*session) *leg {
	if c == nil || !c.rescuable() || c.tokens == tokens {
		return nil
	}
	for _, s := range slices.Backward(before) {
		if d := w.givers[s.id]; d != nil {
			return d
		}
	}
	return nil
}

// mayFollow reports whether legs of a session may be sent after the first byte, although another one's were read since:
// it goes on with a stream whose D failed, or it gave the client tokens, and its P is late.
func (w *world) mayFollow(room string) bool {
	s := w.sessions[room]
	return w.givers[room] != nil || s != nil && s.rescues != nil && s.rescues.dead.Load()
}

// checkAttempts checks the number of a request's attempts, and returns how many of them began a rescue.
func (b *ledger) checkAttempts(breach func(string), w *world, list []*session) (rescues int) {
	tries := 0
	for i, s := range list {
		if i > 0 && b.givers[list[i-1].id] != nil {
			rescues, tries = rescues+1, 0
		}
		if tries++; tries > maxAttempts {
			breach("more attempts than allowed")
		}
		if s.out.Resumed > 0 && rescues == 0 {
			breach("an attempt took over a stream that was not cut")
		}
	}
	if rescues > w.protocol.rescues {
		breach("more rescues than allowed")
	}
	return rescues
}

// checkHedges checks that of two prefills of one attempt one went on, and returns the request's attempts without those
// that did not.
func checkHedges(breach func(string), list []*session) (went []*session) {
	of := map[int][]*session{}
	for _, s := range list {
		if s.ended == 0 {
			continue // a breach, which check has told
		}
		n := s.out.Session.Attempt
		of[n] = append(of[n], s)
		if s.out.Retry != "hedge" {
			went = append(went, s)
		} else if s.legsStarted[1] > 0 || s.out.Final {
			breach("both of two prefills went on")
		}
	}
	for _, both := range of {
		if len(both) > 2 || len(both) == 2 && both[0].out.Session.Prefill.ID == both[1].out.Session.Prefill.ID {
			breach("a second prefill was sent to the same engine, or a third one was sent")
		}
	}
	if len(went) != len(of) {
		breach("not one of two prefills went on")
	}
	return went
}

// checkRescues compares the streams whose D failed with what was counted.
func (b *ledger) checkRescues(breach func(string), w *world) {
	lost, rescued := 0, 0
	for _, list := range b.requests {
		for _, s := range list {
			if s.out.Resumed > 0 {
				rescued++
			}
			d := b.givers[s.id]
			if d == nil || !d.dead.Load() || s.out.Err != nil && !s.out.Err.EngineFault() {
				continue
			}
			if lost++; s.out.Err == nil { // the client had all but [DONE]
				rescued++
			}
		}
	}
	counted := b.meter.events()
	b.spans.mu.Lock()
	defer b.spans.mu.Unlock()
	if !maps.Equal(counted, b.spans.events) {
		breach(fmt.Sprintf("counted was %v, and told to spans %v", counted, b.spans.events))
	}
	all, wentOn := 0, 0
	for name, n := range counted {
		switch {
		case !strings.HasPrefix(name, "pd.rescue "),
			strings.HasSuffix(name, " refused temperature"): // of requests whose D tells no tokens
			continue
		case strings.HasPrefix(name, "pd.rescue rescued "):
			wentOn += n
		}
		all += n
	}
	if all != lost || wentOn != rescued {
		breach(fmt.Sprintf("%d streams lost their D, and %d went on; told were %d and %d", lost, rescued, all, wentOn))
	}
}

// givesUp are failures of D in the midst of a stream that may be rescued.
var givesUp = []*event{
	{name: "sends an error event in mid-stream", role: decodeRole, at: []point{atFirst, atSecond}, stream: true,
		fault: ends(saysNo, "[DONE]")},
	{name: "gives up in mid-stream", role: decodeRole, at: []point{atFirst, atSecond}, stream: true,
		fault: ends(choice("", `"abort"`), "[DONE]")},
	{name: "ends its stream early", role: decodeRole, at: []point{atFirst, atSecond}, stream: true, fault: ends()},
}

// failures are what may happen to engines in a random run of the client, if it is known to them.
func (c *client) failures() []*event {
	if c == nil || !c.rescuable() {
		return events
	}
	return slices.Concat(events, givesUp)
}

// fillPlaces rescues as many streams at a time as the two prefill engines have places for. Those that get none at once
// wait for an engine that has its four: all earlier rescues have given their places back.
func (w *world) fillPlaces() {
	first := len(w.legs)
	for range 2 * rescuesAtOne {
		w.start(byDo, true, true)
	}
	of := func(role string, at point) (list []*leg) {
		for _, l := range w.waiting() {
			if l.role == role && (l.at == at || at == noPoint) {
				list = append(list, l)
			}
		}
		return list
	}
	step := func(list []*leg, f *fault) {
		for _, l := range list {
			l.let(f)
		}
		synctest.Wait()
	}
	synctest.Wait()
	for range 100 {
		if len(of(decodeRole, atFirst)) == 2*rescuesAtOne {
			break
		}
		step(slices.DeleteFunc(w.waiting(), func(l *leg) bool {
			return l.role == decodeRole && l.at == atFirst || slices.Contains(w.legs[:first], l)
		}), nil)
	}
	step(of(decodeRole, atFirst), &fault{resets: true})
	at, most := map[string]int{}, 0
	found := of(prefillRole, atDial)
	for _, l := range found {
		at[l.host]++
		most = max(most, at[l.host])
	}
	if len(found) != 2*rescuesAtOne && most != rescuesAtOne {
		w.breach("%d of %d rescues found a place, at the engines %v", len(found), 2*rescuesAtOne, at)
	}
}

// Where D fails in mid-stream, whatever it does, the client gets the whole response.
func TestStreamsGoOnWhereverTheirDFails(t *testing.T) {
	for _, s := range rescuing {
		for _, entrance := range []string{byDo, byHandler} {
			base := path{scenario: s, entrance: entrance, stream: true, lead: prefillRole, coupled: true}
			calm, ok := run(t, base)
			require.True(t, ok)
			require.Equal(t, served, calm.told)
			for i, state := range calm.states {
				if state.waiting != "D first" && state.waiting != "D second" {
					continue
				}
				for _, e := range state.possible {
					if e.role != decodeRole {
						continue
					}
					p := base
					p.moves = append(slices.Clone(calm.moves[:i]), e.move())
					if r, _ := run(t, p); r.told != served {
						t.Errorf("%s, %s, %s at %s: the client got %s", s.name, entrance, e.name, state.waiting, r.told)
					}
				}
			}
		}
	}
}
