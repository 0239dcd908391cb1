// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"

	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/internal/verdict"
)

// Passed tells of the next piece of a response that the caller relays ([Step.Relay]), before the caller passes it on,
// so that an end that is an error counts as one: a finish_reason "abort" or "error", an error event, and their like in
// each API (docs/retries.md). last says that the response ends with it. The error, of [CodeStreamBroken], says that the
// engine gave the request up: the caller passes neither this piece nor more, and cuts the response so that no client
// takes it for whole. Whatever the caller does, and whatever End is told, the request counts as failed. Before Relay,
// and of a response whose status is an error's, pieces say nothing. Who does not call Passed leaves such ends to the
// client.
func (st *Step) Passed(piece []byte, last bool) error {
	st.s.touch()
	st.mu.Lock()
	serves := st.serves
	st.mu.Unlock()
	if !serves {
		return nil
	}
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.relayed == nil {
		if len(piece) == 0 && !last { // it does not tell yet what the response is
			return nil
		}
		s.relayed = newRelayed(st.a, piece)
	}
	if !s.relayed.gaveUp(piece, last) {
		return nil
	}
	return &Error{Code: CodeStreamBroken, Leg: LegDecode, Phase: "response", Connector: st.a.f.name,
		Endpoint: st.a.s.Decode.ID, Message: errGaveUp}
}

const errGaveUp = "the decode engine aborted the request"

// relayed looks for the end of a response that goes past the flow.
type relayed struct {
	events  bool
	guarded bool
	endings bool          // of an API that is not guarded
	tail    verdict.Tail  // of a guarded response
	outer   verdict.Outer // of one that is neither guarded nor a stream
	held    []byte        // the beginning of an event
	failed  bool
}

// maxRelayedEvent is as much of an event as is kept. An ending is shorter, and of a longer event only marks are found.
const maxRelayedEvent = 64 << 10

// newRelayed looks at a response that begins with a piece. An engine may answer a request for a stream without one.
func newRelayed(a *attempt, first []byte) *relayed {
	r := &relayed{guarded: contract.API(a.s.API).Guarded, endings: !a.inBackground(),
		events: a.s.Request.Stream && !bytes.HasPrefix(bytes.TrimLeft(first, " \t\r\n"), []byte("{"))}
	r.tail = verdict.NewTail(false, a.failureStop())
	return r
}

func (r *relayed) gaveUp(piece []byte, last bool) bool {
	switch {
	case r.failed:
	case r.events:
		r.failed = r.stream(piece, last)
	case r.guarded:
		r.failed = r.tail.Whole(piece, last) >= 0
	case r.endings:
		r.failed = r.outer.GaveUp(piece) >= 0
	}
	return r.failed
}

func (r *relayed) stream(piece []byte, last bool) bool {
	from := max(0, len(r.held)-2) // what is before it was searched in vain
	r.held = append(r.held, piece...)
	rest := r.held
	for {
		event, after, ok := sse.NextFrom(rest, from)
		from = 0
		if !ok && last && len(rest) > 0 { // the last event may lack its empty line
			event, after, ok = rest, nil, true
		}
		if !ok {
			break
		}
		if r.fails(event) {
			return true
		}
		rest = after
	}
	if len(rest) > maxRelayedEvent {
		if r.guarded && r.tail.GaveUp(rest) >= 0 {
			return true
		}
		rest = rest[len(rest)-maxRelayedEvent/2:]
	}
	r.held = r.held[:copy(r.held, rest)]
	return false
}

func (r *relayed) fails(event []byte) bool {
	data := sse.Data(event)
	switch {
	case len(data) == 0:
		return false
	case verdict.IsError(data) || sse.Named(event, "error"):
		return true
	case r.guarded:
		return r.tail.GaveUp(data) >= 0
	}
	return r.endings && verdict.EndsFailed(data)
}
