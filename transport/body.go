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
	// directRead is the smallest buffer of a caller into which Read reads the socket directly. With a smaller one Read
	// reads into the connection's buffer.
	directRead = 1 << 10
	// slowRead is a number of bytes: a read of at most this many ends bulk mode (body.bulk).
	slowRead = 2 << 10
)

// The states of a body. Another goroutine than Read's may call Close, also while Read runs.
const (
	bodyOpen int32 = iota
	bodyReading
	bodyEnded // read to the end, or failed; the body no longer has the connection
	bodyClosing
	bodyClosed
)

// body reads a response from its connection, in the goroutine that calls Read.
type body struct {
	state  atomic.Int32
	c      *conn // nil after the body's end
	abort  func()
	ctx    context.Context
	resp   *http.Response
	err    error // the result of all further reads
	reused bool
	begun  bool // bytes of the body have come
	keep   bool // the connection may be used again

	left    int64 // bytes to read; -1 if the body ends with its chunks or the connection
	chunked bool
	chunks  chunks
	bulk    bool // more arrives than fits the caller's buffer, so Read uses a larger one
}

// Read returns what has arrived, as many chunks as p has room for, with at most one system call.
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
	if n > 0 && !b.begun {
		b.begun = true
		if b.c.echo.misplacedBody(b.c.id, p[:n]) {
			b.c.t.suspect(b.c.key)
			n, err = 0, errMisplaced
		}
	}
	return n, b.pause(err)
}

// WaitReadable returns when bytes have come, or when Read would return at once for another reason. Unlike Read it needs
// no buffer while it waits. Where that cannot be had, as over TLS, it returns at once. Like Read it is called by one
// goroutine, and Close may be called meanwhile.
func (b *body) WaitReadable() {
	if b.state.CompareAndSwap(bodyOpen, bodyReading) {
		b.c.wait()
		_ = b.pause(nil)
	}
}

// pause ends a Read. If err says so, it ends the body.
func (b *body) pause(err error) error {
	if err == nil {
		if !b.state.CompareAndSwap(bodyReading, bodyOpen) {
			b.end(false, bodyClosed)
		}
		return nil
	}
	if err != io.EOF {
		b.keep = false
	}
	if b.err = err; err != io.EOF {
		b.err = bodyError(b.ctx, err, b.reused)
	}
	// After this, Close can no longer end the connection, so it may be given away.
	if b.state.CompareAndSwap(bodyReading, bodyEnded) {
		b.leave(b.keep)
		return b.err
	}
	b.end(false, bodyClosed)
	if err == io.EOF {
		return err
	}
	return bodyError(b.ctx, http.ErrBodyReadAfterClose, b.reused)
}

func (b *body) end(keep bool, state int32) {
	b.leave(keep)
	b.state.Store(state)
}

func (b *body) leave(keep bool) {
	c := b.c
	b.c = nil
	c.end(keep)
}

// Close ends the response. If the body was not read to its end, Close closes the connection, since its next user would
// have to wait for the rest.
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

// readChunked reads the socket into p and decodes in place, so that a stream that waits needs no buffer. After a read
// that fills p, it uses a larger buffer until the stream is slow again. Otherwise a caller would never get a full p,
// since decoding shortens what was read.
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
			if b.keep && err == io.EOF && unasked(p[used:m]) {
				b.c.t.suspect(b.c.key)
			}
			b.keep = false // the engine sent more than the response
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

// bodyError returns an error of reading a response as an *Error.
func bodyError(ctx context.Context, err error, reused bool) error {
	kind := requestKind(ctx, err)
	switch {
	case errors.Is(err, http.ErrBodyReadAfterClose):
		kind = KindOther
	case kind == KindOther:
		kind = KindProtocol // the remaining errors are faults of chunks and trailers
	}
	if ctx.Err() != nil && kind != KindOther {
		err = context.Cause(ctx)
	}
	return &Error{Sent: SentAnswered, Kind: kind, Reused: reused, Err: err}
}
