// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"errors"
	"io"

	"github.com/pdkit/pdkit/connector"
)

// maxRewritten is the largest event, or whole answer, that a connector may rewrite.
const maxRewritten = 64 << 20

// rewrite puts the connector's event function into the stream, if this request needs one.
func (b *Body) rewrite(a *attempt) bool {
	fn := a.rewriting(b.status)
	if a.asked && b.sse && b.status == 200 {
		fn = withoutUsage(fn, a.decodeUsage)
	}
	if fn == nil {
		return false
	}
	b.src = &rewriter{src: b.src, sse: b.sse, fn: func(data []byte) (out []byte, err error) {
		if e := a.guard(LegDecode, "rewrite", func() error { out, err = fn(data); return err }); e != nil {
			return nil, e
		}
		return out, nil
	}}
	return true
}

// rewriting returns how the connector changes this response of decode's, nil if it does not.
func (a *attempt) rewriting(status int) (fn connector.EventFunc) {
	if a.f.rewriter == nil || !a.twoLegs || status != 200 {
		return nil
	}
	if e := a.guard(LegDecode, "rewrite", func() error {
		fn = a.f.rewriter.Rewrite(a.s, a.awaitPrefill)
		return nil
	}); e != nil {
		return func([]byte) ([]byte, error) { return nil, e }
	}
	return fn
}

// awaitPrefill returns P's answer. Where both legs run together it waits for it.
func (a *attempt) awaitPrefill() *connector.PrefillResult {
	if a.pEnded != nil {
		select {
		case <-a.pEnded:
		case <-a.ctx.Done():
		}
	}
	return a.p.Load()
}

// rewriter passes every event's data, or the whole answer, through a function. Events without data (comments) and [DONE] stay as
// they are.
type rewriter struct {
	src io.Reader
	sse bool
	fn  connector.EventFunc

	in  []byte // read and not yet an event
	at  int    // how much of it has been searched for the event's end
	out []byte // rewritten and not yet taken
	err error
}

func (r *rewriter) Read(p []byte) (int, error) {
	for len(r.out) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		r.fill()
	}
	n := copy(p, r.out)
	r.out = r.out[n:]
	return n, nil
}

var errEventTooLarge = errors.New("pdflow: an event of the answer is too large")

func (r *rewriter) fill() {
	chunk := make([]byte, streamBuffer)
	n, err := r.src.Read(chunk)
	r.in = append(r.in, chunk[:n]...)
	if len(r.in) > maxRewritten {
		r.err = errEventTooLarge
		return
	}
	if r.sse {
		r.events()
	}
	if err == nil || r.err != nil {
		return
	}
	r.err = err
	if !errors.Is(err, io.EOF) {
		return
	}
	if r.sse {
		r.out = append(r.out, r.in...) // a last event without its empty line
	} else if r.out, err = r.fn(r.in); err != nil {
		r.err = err
	}
	r.in = nil
}

func (r *rewriter) events() {
	for {
		event, rest, ok := nextEventFrom(r.in, r.at)
		if !ok {
			r.at = max(0, len(r.in)-2) // a large event comes in many reads, and is searched once
			return
		}
		r.at = 0
		whole := r.in[:len(r.in)-len(rest)]
		data := eventData(event)
		if len(data) == 0 || bytes.Equal(data, []byte("[DONE]")) {
			r.out = append(r.out, whole...)
		} else if changed, err := r.fn(data); err != nil {
			r.err = err
			return
		} else if changed != nil {
			r.out = appendEvent(r.out, event, changed)
		}
		r.in = rest
	}
}

// appendEvent writes an event with new data and its other fields as they were.
func appendEvent(dst, event, data []byte) []byte {
	for line := range bytes.Lines(event) {
		if !bytes.HasPrefix(line, []byte("data:")) {
			dst = append(dst, line...)
		}
	}
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		dst = append(dst, "data: "...)
		dst = append(dst, line...)
		dst = append(dst, '\n')
	}
	return append(dst, '\n')
}
