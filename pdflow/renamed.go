// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"slices"

	"github.com/pdkit/pdkit/internal/modelname"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/internal/verdict"
)

// Renames tells that the caller gives each piece of a response that it relays to [Response.Rename]. A response that has
// another name for its model than the client ([WithModel]) may be relayed then. Renames is called before Next.
func (s *Steps) Renames() { s.renames.Store(true) }

// maxRenamed is the largest event, or whole response, of which the model's name is looked for. It is that of a response
// that the flow reads itself.
const maxRenamed = 64 << 20

// renamer puts the client's name for the model into a relayed response, piece by piece.
type renamer struct {
	b      *Body
	put    func([]byte) []byte
	events bool
	in     []byte // an event, or a response that is no stream, as far as it has come
	at     int    // how much of in has been searched for the event's end
	out    []byte
}

// renamer returns what [Response.Rename] is, nil if the client has the engines' name.
func (b *Body) renamer() func(piece []byte, last bool) ([]byte, error) {
	x := b.a.x
	if x.names == nil {
		return nil
	}
	r := &renamer{b: b, put: x.names.PutBack(x.asked), events: x.req.Stream && serves(b.status)}
	return r.next
}

func (r *renamer) next(piece []byte, last bool) ([]byte, error) {
	limit := maxRenamed
	if !serves(r.b.status) {
		limit = maxErrorBody
	}
	if len(r.in)+len(piece) > limit {
		return nil, r.b.failed(CodeStreamBroken, "an event of the response is too large")
	}
	r.in, r.out = append(r.in, piece...), r.out[:0]
	if r.events {
		r.whole()
	}
	if last && len(r.in) > 0 {
		r.rest()
		r.in = nil
	}
	return r.out, nil
}

// whole writes the events that have come whole.
func (r *renamer) whole() {
	from := 0
	for {
		in := r.in[from:]
		event, rest, ok := sse.NextFrom(in, r.at)
		if !ok {
			r.at = max(0, len(in)-2) // a large event comes in many pieces, and each byte is searched once
			break
		}
		r.at = 0
		r.event(event, in[:len(in)-len(rest)])
		from += len(in) - len(rest)
	}
	r.in = slices.Delete(r.in, 0, from)
}

// event writes one event; whole has its empty line, too.
func (r *renamer) event(event, whole []byte) {
	switch data := sse.Data(event); {
	case verdict.IsError(data) || sse.Named(event, "error"):
		r.out = sse.AppendEvent(r.out, event, (*bodyOwner)(r.b).Fault(data))
	case bytes.Contains(data, modelname.Mark):
		r.out = sse.AppendEvent(r.out, event, r.put(data))
	default:
		r.out = append(r.out, whole...)
	}
}

// rest writes what is left at the response's end: a response that is no stream, an error among them.
func (r *renamer) rest() {
	switch {
	case r.events && bytes.IndexByte(r.in, '{') != 0:
		r.event(r.in, r.in)
	case serves(r.b.status):
		r.out = append(r.out, r.put(r.in)...)
	default:
		r.out = append(r.out, errorObject(r.b.a.s.API, r.b.a.refused(&r.b.a.out.Decode, nil, r.in))...)
	}
}
