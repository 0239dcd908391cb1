// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"context"
	"errors"
	"io"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/resume"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/internal/verdict"
)

// maxHead is how much of a stream is read in search of its first event with content. A stream whose first events are
// larger is passed on unseen.
const maxHead = 64 << 10

// readHead reads until the first event is known that holds more than a preamble, or the first bytes of a response that
// is not streamed. Until then nothing has gone to the client, so that a failed KV load, which vLLM reports inside a
// stream of status 200 (docs/protocols/nixl.md, recording 56), can still become a 500 or another attempt. A response
// that decides whether P is needed is read to its end, up to maxHead.
func (b *Body) readHead(ctx context.Context) *Error {
	deciding := b.deciding()
	for {
		b.wait()
		n, err := b.src.Read(b.buf[b.n:])
		b.n += n
		b.received += int64(n)
		if err != nil && !errors.Is(err, io.EOF) {
			switch {
			case !errors.Is(err, resume.ErrGaveUp):
				return b.a.sendError(ctx, LegDecode, "response", err)
			case b.tokens.Fault() != nil:
				return b.erroneous(b.tokens.Fault())
			}
			return b.failed(CodeDecodeFailed, "the decode engine aborted the request")
		}
		if b.eof = err != nil; b.eof && b.n == 0 {
			return b.failed(CodeDecodeFailed, "the decode engine's response is empty")
		}
		if e := b.judgeHead(); e != nil {
			return e
		}
		if b.eof && b.sse && b.guarded && !b.known {
			return b.failed(CodeDecodeFailed, "the decode engine's stream ended before its first token")
		}
		if b.eof && b.sse && b.guarded && b.unframed && !b.tail.Done(b.buf[:b.n]) {
			return b.failed(CodeDecodeFailed, "the decode engine closed the connection before [DONE]")
		}
		if b.eof || b.n > 0 && (!b.sse && !deciding || b.known) {
			return nil
		}
		if b.n == len(b.buf) {
			if b.n >= maxHead {
				return nil
			}
			b.grow()
		}
	}
}

// deciding reports whether the response decides if a prefill is needed.
func (b *Body) deciding() bool { return b.a.f.order == connector.DecodeFirst && b.a.p.Load() == nil }

// judgeHead looks at what has been read so far.
func (b *Body) judgeHead() *Error {
	head := b.buf[:b.n]
	if b.guarded && b.tail.GaveUp(head) >= 0 {
		return b.failed(CodeDecodeFailed, "the decode engine aborted the request")
	}
	if !b.sse {
		return nil
	}
	for !b.known {
		event, rest, ok := sse.Next(head[b.judged:])
		if !ok && b.eof && b.judged < b.n { // the last event may lack its empty line
			event, rest, ok = head[b.judged:], nil, true
		}
		if !ok {
			return nil
		}
		data := sse.Data(event)
		switch {
		case len(data) == 0 || verdict.IsPreamble(data) || bytes.Equal(data, sse.Done):
		case verdict.IsError(data):
			return b.erroneous(data)
		default:
			b.known, b.first = true, data
		}
		b.judged = b.n - len(rest)
	}
	return b.judgeRest(head)
}

// judgeRest looks for an error after the first event, which came with it.
func (b *Body) judgeRest(head []byte) *Error {
	if !b.guarded {
		return nil
	}
	at := verdict.ErrorAt(head)
	if at < 0 {
		return nil
	}
	event, _, ok := sse.Next(head[at:])
	if !ok && b.eof {
		event, ok = head[at:], true
	}
	if data := sse.Data(event); ok && verdict.IsError(data) {
		return b.erroneous(data)
	}
	return nil
}

// erroneous is an error event, as it would be without a stream.
func (b *Body) erroneous(data []byte) *Error {
	e := b.failed(CodeDecodeFailed, "the decode engine reported an error instead of a response")
	e.Status = 500
	e.engine = &engineError{status: 500, said: verdict.FaultOf(data, b.a.isHost)}
	return e
}

func (b *Body) failed(code Code, message string) *Error {
	return &Error{Code: code, Leg: LegDecode, Phase: "response", Connector: b.a.f.name, Endpoint: b.a.s.Decode.ID,
		Status: b.status, Message: message}
}

// significant returns the first event's data, or what has been read of a response that is not streamed.
func (b *Body) significant() []byte {
	if b.sse {
		return b.first
	}
	return b.buf[:b.n]
}
