// SPDX-License-Identifier: Apache-2.0

// Package stream reads a decode engine's response. A chain of filters keeps from the client what is not for it. The
// head is read and judged before anything goes to the client, and the end tells whether the response is whole.
package stream

import (
	"bytes"
	"errors"
	"io"
	"net/http"

	"github.com/pdkit/pdkit/internal/resume"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/internal/verdict"
)

// maxHead is how much of a stream is read in search of its first event with content. A stream whose first events are
// larger is passed on unseen.
const maxHead = 64 << 10

// Config says how a response is read.
type Config struct {
	Events      bool   // a stream of server-sent events
	Guarded     bool   // the response's bytes are enough to find its finish reason: see connector.API.Guarded
	FailureStop string // the stop_reason with which the engine gives up, "" for none
	Deciding    bool   // the response decides whether a prefill is needed: the head is all of it, up to 64 KB
	Shared      bool   // the reader may keep pieces for longer than until its next call
	Length      int64  // of the response in bytes as the client is told it, -1 if it is not
	Depth       int    // of Withheld in an event, in objects around it

	// Endings are the names of the events that end a stream that is not Guarded. Without them nothing says how a
	// response ends that is not Guarded.
	Endings []string

	Rewrite  func(data []byte) ([]byte, error) // the change of each event, or of a whole response; nil: none
	Mark     []byte                            // what each event has that Rewrite changes; nil: it may change all
	Withheld *sse.Member                       // what clients must not see; nil: nothing
	Foreign  *sse.Member                       // what D cannot know, so that a response with it is none; nil: nothing
	Resume   *resume.Stream                    // keeps the tokens of a stream that can be rescued; nil: it cannot
	Owner    Owner
}

// Owner is who passes the response on.
type Owner interface {
	Fault(data []byte) []byte // returns what the client gets of an error event
	Usage(end []byte)         // gets the response's end
}

// Failure is a response with which no client may be served, or not to its end.
type Failure struct {
	Message string
	Event   []byte // the engine's error event; nil if there is none
	Foreign bool   // it has what Config.Foreign names
}

func (f *Failure) Error() string { return f.Message }

func failure(message string) *Failure { return &Failure{Message: message} }

const (
	aborted = "the decode engine aborted the request"
	cutOff  = "the decode engine closed the connection before [DONE]"
)

var errForeign = &Failure{Message: "the decode engine's response has members that only prefill can know", Foreign: true}

// Stream is a response on its way: what was read while the head was awaited, then the engine's bytes. It is for one
// goroutine.
type Stream struct {
	Config
	resp     io.Closer
	src      io.Reader // the end of the chain
	buffer   buffer
	rewriter *sse.Rewriter // nil: none
	forbid   sse.Forbid
	withheld sse.Withheld
	faults   sse.Faults
	tail     verdict.Tail
	outer    verdict.Outer // of a whole response that is not Guarded
	waits    waiter        // resp, if it can wait without a buffer; nil where src, but for faults, may hold parts

	n          int    // bytes of the head in the buffer
	judged     int    // how much of the head has been looked at
	known      bool   // the first event with content is in the head
	firstEvent []byte // its data, until Next
	engines    []byte // the data of an error event, as the engine wrote it
	ended      bool   // the engine's bytes are at their end
	unframed   bool   // nothing but the connection's end tells the response's
	received   int64
}

// Open begins to read a response. s has its Config, and nothing else.
func (s *Stream) Open(resp *http.Response) {
	c := &s.Config
	s.resp, s.src, s.tail = resp.Body, resp.Body, verdict.NewTail(c.Events, c.FailureStop)
	s.unframed = resp.ContentLength < 0 && len(resp.TransferEncoding) == 0
	s.buffer.shared = c.Shared
	s.chain()
	s.buffer.small()
	if c.Events && !c.Shared && (c.Rewrite == nil || c.Mark != nil) && c.Resume == nil {
		s.waits, _ = resp.Body.(waiter)
	}
}

// chain puts the filters behind each other, from the engine to the client.
func (s *Stream) chain() {
	if s.Foreign != nil {
		s.forbid.Forbid(s.src, s.Foreign, errForeign)
		s.src = &s.forbid
	}
	if s.Rewrite != nil {
		s.rewriter = sse.NewRewriter(s.src, s.Events, s.Mark, s.Rewrite)
		s.src = s.rewriter
	}
	if s.Events {
		s.faults.Watch(s.src, s.Endings, s.fault)
		s.src = &s.faults
	}
	if s.Withheld != nil {
		s.withheld.Withhold(s.src, s.Withheld, s.Depth, s.Events, s.Length)
		s.src = &s.withheld
	}
	if s.Resume != nil {
		s.Resume.Deciding = s.Deciding
		s.src = s.Resume.Reader(s.src)
	}
}

// fault makes an error within a stream what it would be without one, and ends the stream behind it. An ending that is a
// failure ends it, too, and is not passed on.
func (s *Stream) fault(event, data []byte) ([]byte, error) {
	switch {
	case verdict.IsError(data) || sse.Named(event, "error"):
		if !s.known { // else nobody judges it any more
			s.engines = bytes.Clone(data)
		}
		return s.Owner.Fault(data), failure(aborted)
	case s.Endings != nil && verdict.EndsFailed(data):
		return nil, failure(aborted)
	}
	return data, nil
}

// Of is a response that is there already.
func Of(body []byte, events bool, owner Owner) *Stream {
	return &Stream{Config: Config{Events: events, Owner: owner}, resp: http.NoBody, src: http.NoBody,
		buffer: buffer{buf: body}, n: len(body), ended: true}
}

// Head reads until the first event is known that holds more than a preamble, or the first bytes of a response that is
// not streamed. Until then nothing has gone to the client, so that a failed KV load, which vLLM reports inside a stream
// of status 200 (docs/protocols/nixl.md, recording 56), can still become a 500 or another attempt. The error is a
// *Failure, or that of reading.
func (s *Stream) Head() error {
	for {
		s.wait()
		n, err := s.src.Read(s.buffer.buf[s.n:])
		s.n += n
		s.received += int64(n)
		switch {
		case errors.Is(err, resume.ErrGaveUp):
			return &Failure{Message: aborted, Event: s.Resume.Fault()}
		case err != nil && !errors.Is(err, io.EOF):
			return err
		}
		if s.ended = err != nil; s.ended && s.n == 0 {
			return failure("the decode engine's response is empty")
		}
		if f := s.judge(); f != nil {
			return f
		}
		if s.ended && s.Events && s.Guarded {
			if !s.known {
				return failure("the decode engine's stream ended before its first token")
			}
			if s.unframed && !s.tail.Done(s.buffer.buf[:s.n]) {
				return failure(cutOff)
			}
		}
		if s.ended || s.n > 0 && (!s.Events && !s.Deciding || s.known) {
			return nil
		}
		if s.n == len(s.buffer.buf) {
			if s.n >= maxHead {
				return nil
			}
			s.buffer.grow(s.n)
		}
	}
}

// judge looks at what has been read so far.
func (s *Stream) judge() *Failure {
	head := s.buffer.buf[:s.n]
	if s.Guarded {
		if at := s.tail.GaveUp(head); at >= 0 {
			return &Failure{Message: aborted, Event: verdict.Abort(head[at:])}
		}
	}
	if !s.Events {
		if s.Endings != nil && s.outer.GaveUp(head[s.judged:]) >= 0 {
			return failure(aborted)
		}
		s.judged = s.n
		return nil
	}
	for !s.known {
		event, rest, ok := sse.Next(head[s.judged:])
		if !ok && s.ended && s.judged < s.n { // the last event may lack its empty line
			event, rest, ok = head[s.judged:], nil, true
		}
		if !ok {
			return nil
		}
		data := sse.Data(event)
		switch {
		case len(data) == 0 || verdict.IsPreamble(data) || bytes.Equal(data, sse.Done):
		case verdict.IsError(data):
			if s.engines == nil { // too long to be made anew
				s.engines = data
			}
			return &Failure{Event: s.engines}
		default:
			s.known, s.firstEvent = true, data
		}
		s.judged = s.n - len(rest)
	}
	return nil
}

// Significant returns the data of the first event with content, or the head of a response that is not streamed. It is
// valid until Next.
func (s *Stream) Significant() []byte {
	if s.Events {
		return s.firstEvent
	}
	return s.buffer.buf[:s.n]
}

// First returns the data of the first event, whatever it holds, or the head of a response that is not streamed. It is
// valid until Next.
func (s *Stream) First() []byte {
	head := s.buffer.buf[:s.n]
	if !s.Events {
		return head
	}
	for {
		event, rest, ok := sse.Next(head)
		if !ok {
			return nil
		}
		if data := sse.Data(event); len(data) > 0 {
			return data
		}
		head = rest
	}
}

// Begun reports whether a first event with content came.
func (s *Stream) Begun() bool { return s.known }

// Ended reports whether the engine's bytes are at their end.
func (s *Stream) Ended() bool { return s.ended }

// Rewritten returns the length of a whole response that has been rewritten, in bytes, once its head has been read. It
// is not known, and ok is false, if the response has something to be withheld.
func (s *Stream) Rewritten() (n int, ok bool) {
	if s.rewriter == nil {
		return 0, false
	}
	b, ok := s.rewriter.Whole()
	return len(b), ok && (s.Withheld == nil || !s.Withheld.In(b))
}

// Received returns how many bytes have come.
func (s *Stream) Received() int64 { return s.received }

// Next returns the next piece of the response: all that is there. It is valid until the next call. At the end the error
// is io.EOF. A piece may come together with a *Failure, and with an error of reading: resume.ErrGaveUp of a stream that
// may be rescued, else the connection's.
func (s *Stream) Next() ([]byte, error) {
	if s.n > 0 {
		head := s.buffer.buf[:s.n]
		s.n, s.firstEvent = 0, nil
		if s.ended {
			s.Owner.Usage(head)
		} else { // it has been searched: what two reads cut has not
			s.tail.Keep(head)
		}
		return head, nil
	}
	if s.ended {
		return nil, io.EOF
	}
	s.wait()
	s.buffer.choose()
	n, err := s.src.Read(s.buffer.buf)
	s.received += int64(n)
	piece := s.buffer.buf[:n]
	s.buffer.took(n, s.faults.Held())
	end := errors.Is(err, io.EOF)
	if cut := s.gaveUp(piece, end); cut >= 0 {
		return piece[:cut], failure(aborted)
	}
	if !end {
		return piece, err
	}
	return piece, s.end(piece)
}

// end is the error with the last piece: nil if it holds something and the response is whole.
func (s *Stream) end(piece []byte) error {
	s.ended = true
	s.Owner.Usage(s.tail.End(piece))
	switch {
	case s.Events && s.Guarded && s.unframed && !s.tail.Done(piece):
		return failure(cutOff)
	case len(piece) == 0:
		return io.EOF
	}
	return nil
}

// gaveUp returns how much of a piece may go to the client if the engine says in it that it gave up, else -1. A stream
// is searched at its end only; a response that is not streamed comes in few pieces, and is searched in each.
func (s *Stream) gaveUp(piece []byte, end bool) int {
	switch {
	case !s.Guarded:
		if !end {
			s.tail.Keep(piece)
		}
		if !s.Events && s.Endings != nil {
			return s.outer.GaveUp(piece)
		}
		return -1
	case s.Events:
		return s.tail.Stream(piece, end)
	}
	return s.tail.Whole(piece, end)
}

// Finish ends a stream whose engine died when all tokens had come: the client gets its [DONE].
func (s *Stream) Finish() {
	s.src, s.ended = http.NoBody, true
	s.Owner.Usage(s.tail.End(nil))
	s.buffer.free()
	s.buffer.buf = []byte("data: " + string(sse.Done) + "\n\n")
	s.n = len(s.buffer.buf)
}

// Close gives back the connection and the buffer.
func (s *Stream) Close() {
	_ = s.resp.Close()
	s.n, s.firstEvent = 0, nil
	s.buffer.free()
}
