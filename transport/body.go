// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync/atomic"
)

const (
	// directRead is the least room of a caller that the socket is read into
	// directly. Below it the socket is read into the connection's buffer.
	directRead = 1 << 10
	// slowRead: a read of at most this many bytes ends bulk mode (body.bulk).
	slowRead = 2 << 10
)

// The states of a body. Close may come from another goroutine than Read, and
// while it runs.
const (
	bodyOpen int32 = iota
	bodyReading
	bodyEnded // read to the end, or failed: the connection was given back
	bodyClosing
	bodyClosed
)

// body reads a response from its connection, in the goroutine that calls Read.
type body struct {
	state  atomic.Int32
	c      *conn // nil once the body is over
	abort  func()
	ctx    context.Context
	resp   *http.Response
	err    error // of all reads to come
	reused bool
	keep   bool // the connection may serve again

	left    int64 // bytes; -1 if only the end tells
	chunked bool
	chunks  chunks
	bulk    bool // more arrives than the caller's Read has room for: read by the larger buffer
}

// Read returns what has arrived, all chunks of it that p has room for, by one
// system call at most.
func (b *body) Read(p []byte) (int, error) {
	if !b.state.CompareAndSwap(bodyOpen, bodyReading) {
		if b.state.Load() == bodyEnded {
			return 0, b.err
		}
		return 0, bodyError(b.ctx, http.ErrBodyReadAfterClose, b.reused)
	}
	if len(p) == 0 {
		return 0, b.pause(nil)
	}
	n, err := b.read(p)
	return n, b.pause(err)
}

// pause ends a Read, and the body if err says so.
func (b *body) pause(err error) error {
	if err == nil {
		if !b.state.CompareAndSwap(bodyReading, bodyOpen) {
			b.over(false, bodyClosed)
		}
		return nil
	}
	if err != io.EOF {
		b.keep = false
	}
	if b.err = err; err != io.EOF {
		b.err = bodyError(b.ctx, err, b.reused)
	}
	// The connection may be given away only after Close can no longer end it.
	if b.state.CompareAndSwap(bodyReading, bodyEnded) {
		b.leave(b.keep)
		return b.err
	}
	b.over(false, bodyClosed)
	if err == io.EOF {
		return err
	}
	return bodyError(b.ctx, http.ErrBodyReadAfterClose, b.reused)
}

func (b *body) over(keep bool, state int32) {
	b.leave(keep)
	b.state.Store(state)
}

func (b *body) leave(keep bool) {
	c := b.c
	b.c = nil
	c.end(keep)
}

// Close ends the response. One that was not read to its end takes its connection
// with it: what an engine still sends would have to be waited for.
func (b *body) Close() error {
	for {
		switch state := b.state.Load(); state {
		case bodyOpen:
			if b.state.CompareAndSwap(bodyOpen, bodyClosed) {
				b.leave(false)
				return nil
			}
		case bodyReading:
			if b.state.CompareAndSwap(bodyReading, bodyClosing) {
				b.abort()
				return nil
			}
		case bodyEnded:
			b.state.CompareAndSwap(bodyEnded, bodyClosed)
		default:
			return nil
		}
	}
}

func (b *body) read(p []byte) (int, error) {
	if b.chunked {
		return b.readChunked(p)
	}
	if b.left >= 0 && int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.readPlain(p)
	if b.left < 0 {
		return n, err
	}
	b.left -= int64(n)
	switch {
	case err == io.EOF:
		err = io.ErrUnexpectedEOF
	case err == nil && b.left == 0:
		err = io.EOF
	}
	return n, err
}

func (b *body) readPlain(p []byte) (int, error) {
	if len(b.c.buffered()) == 0 {
		if len(p) >= directRead || int64(len(p)) == b.left {
			return b.c.readInto(p)
		}
		if _, err := b.c.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, b.c.buffered())
	b.c.take(n)
	return n, nil
}

// readChunked decodes in p itself what the socket has, so that a stream that
// waits needs no buffer. A stream that fills p is read by the larger buffer
// until it is slow again: decoded, a full p would never look full to the caller.
func (b *body) readChunked(p []byte) (int, error) {
	for {
		if text := b.c.buffered(); len(text) > 0 {
			n, used, err := b.chunks.decode(p, text)
			b.c.take(used)
			if n > 0 || err != nil {
				return n, b.chunkedEnd(err)
			}
			continue
		}
		if len(p) < directRead || b.bulk && len(p) < b.c.t.options.ReadBuffer {
			m, err := b.c.fill()
			if err != nil {
				return 0, unexpected(err)
			}
			b.bulk = m > slowRead
			continue
		}
		m, err := b.c.readInto(p)
		if err != nil {
			return 0, unexpected(err)
		}
		b.bulk = m == len(p)
		n, used, err := b.chunks.decode(p, p[:m])
		if used < m {
			b.keep = false // more than the response came
		}
		if n > 0 || err != nil {
			return n, b.chunkedEnd(err)
		}
	}
}

func (b *body) chunkedEnd(err error) error {
	if err != io.EOF {
		return err
	}
	if bad := b.chunks.addTrailer(&b.resp.Trailer); bad != nil {
		return bad
	}
	return io.EOF
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// bodyError gives an error of reading a response this package's type.
func bodyError(ctx context.Context, err error, reused bool) error {
	kind := requestKind(ctx, err)
	switch {
	case errors.Is(err, http.ErrBodyReadAfterClose):
		kind = Other
	case kind == Other:
		kind = Protocol // what is left are broken chunks and trailers
	}
	if ctx.Err() != nil && kind != Other {
		err = context.Cause(ctx)
	}
	return &Error{Sent: Answered, Kind: kind, Reused: reused, Err: err}
}
