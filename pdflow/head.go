// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"context"
	"errors"
	"io"
	"unsafe"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
)

// maxHead is how much of a stream is read in search of its first event with content. A stream whose first events are
// larger is passed on unseen.
const maxHead = 64 << 10

// readHead reads until the first event is known that holds more than a preamble, or the first bytes of an answer that is not
// streamed. Until then nothing has gone to the client, so that a failed KV load, which vLLM reports inside a stream of status
// 200 (docs/protocols/nixl.md, recording 56), can still become a 500 or another attempt. An answer that decides whether
// P is needed is read to its end, up to maxHead.
func (b *Body) readHead(ctx context.Context) *Error {
	deciding := b.a.f.order == connector.DecodeFirst && b.a.p.Load() == nil
	for {
		n, err := b.src.Read(b.buf[b.n:])
		b.n += n
		b.received += int64(n)
		if err != nil && !errors.Is(err, io.EOF) {
			e := b.a.sendError(ctx, LegDecode, "answer", err)
			return e
		}
		if b.eof = err != nil; b.eof && b.n == 0 {
			return b.failed(CodeDecodeFailed, "the decode engine's answer is empty")
		}
		if e := b.judgeHead(); e != nil {
			return e
		}
		if b.eof && b.sse && b.guarded && !b.known {
			return b.failed(CodeDecodeFailed, "the decode engine's stream ended before its first token")
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

// judgeHead looks at what has been read so far.
func (b *Body) judgeHead() *Error {
	head := b.buf[:b.n]
	if b.guarded && find(head) >= 0 {
		return b.failed(CodeDecodeFailed, "the decode engine aborted the request")
	}
	if !b.sse {
		return nil
	}
	for !b.known {
		event, rest, ok := nextEvent(head[b.judged:])
		if !ok && b.eof && b.judged < b.n { // the last event may lack its empty line
			event, rest, ok = head[b.judged:], nil, true
		}
		if !ok {
			return nil
		}
		data := eventData(event)
		switch {
		case len(data) == 0 || isPreamble(data) || bytes.Equal(data, doneData):
		case isErrorEvent(data):
			return b.erroneous(data)
		default:
			b.known, b.first = true, data
		}
		b.judged = b.n - len(rest)
	}
	return b.judgeRest(head)
}

// doneData ends a stream. Alone it is no answer.
var doneData = []byte("[DONE]")

// judgeRest looks for an error after the first event, which came with it.
func (b *Body) judgeRest(head []byte) *Error {
	if !b.guarded {
		return nil
	}
	at := errorAt(head)
	if at < 0 {
		return nil
	}
	event, _, ok := nextEvent(head[at:])
	if !ok && b.eof {
		event, ok = head[at:], true
	}
	if data := eventData(event); ok && isErrorEvent(data) {
		return b.erroneous(data)
	}
	return nil
}

// erroneous is an error event, as it would be without a stream.
func (b *Body) erroneous(data []byte) *Error {
	e := b.failed(CodeDecodeFailed, "the decode engine reported an error instead of an answer")
	e.Status = 500
	e.answer = &reply{status: 500}
	if gjson.Get(view(data), "error").Exists() {
		e.answer.body = bytes.Clone(data)
	}
	return e
}

func (b *Body) failed(code Code, message string) *Error {
	return &Error{Code: code, Leg: LegDecode, Phase: "answer", Connector: b.a.f.name, Endpoint: b.a.s.Decode.ID, Status: b.status, Message: message}
}

// significant returns the first event's data, or what has been read of an answer that is not streamed.
func (b *Body) significant() []byte {
	if b.sse {
		return b.first
	}
	return b.buf[:b.n]
}

// nextEvent cuts the first whole server-sent event off b.
func nextEvent(b []byte) (event, rest []byte, ok bool) { return nextEventFrom(b, 0) }

// nextEventFrom is nextEvent where no event's end begins before i.
func nextEventFrom(b []byte, i int) (event, rest []byte, ok bool) {
	for {
		j := bytes.IndexByte(b[i:], '\n')
		if j < 0 {
			return nil, nil, false
		}
		i += j + 1
		switch {
		case i < len(b) && b[i] == '\n':
			return b[:i], b[i+1:], true
		case i+1 < len(b) && b[i] == '\r' && b[i+1] == '\n':
			return b[:i], b[i+2:], true
		}
	}
}

// eventData returns an event's data: one line's as a part of event, several joined by newlines.
func eventData(event []byte) []byte {
	var data []byte
	lines := 0
	for line := range bytes.Lines(event) {
		line = bytes.TrimPrefix(line, []byte("\ufeff")) // a byte order mark may begin the stream
		value, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("data:"))
		if !ok {
			continue
		}
		value = bytes.TrimPrefix(value, []byte(" "))
		if lines++; lines == 1 {
			data = value
		} else {
			data = append(append(bytes.Clone(data), '\n'), value...)
		}
	}
	return data
}

// view reads bytes as a string for gjson without a copy; the bytes must not change meanwhile.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// isErrorEvent knows vLLM's {"error":{…}} the Messages API's {"type":"error",…} and the Responses API's response.failed.
func isErrorEvent(data []byte) bool {
	if !bytes.Contains(data, []byte(`"error"`)) {
		return false
	}
	s := view(data)
	switch gjson.Get(s, "type").String() {
	case "error", "response.failed":
		return true
	}
	e := gjson.Get(s, "error")
	return e.Exists() && e.Type != gjson.Null
}

// isPreamble knows the events that engines send before they have a token: chat's chunk with nothing but a role, and the
// opening events of the Responses and Messages APIs. A failed load shows only after them.
func isPreamble(data []byte) bool {
	s := view(data)
	switch gjson.Get(s, "type").String() {
	case "response.created", "response.in_progress", "response.queued", "message_start", "ping", "content_block_start",
		"response.output_item.added", "response.content_part.added":
		return true
	}
	if !bytes.Contains(data, []byte(`"role"`)) {
		return false
	}
	choice := gjson.Get(s, "choices.0")
	if !choice.Exists() || choice.Get("finish_reason").Type == gjson.String {
		return false
	}
	only := true
	choice.Get("delta").ForEach(func(key, value gjson.Result) bool {
		empty := value.Type == gjson.Null || value.Type == gjson.String && value.Str == ""
		only = key.Str == "role" || empty
		return only
	})
	return only
}
