// SPDX-License-Identifier: Apache-2.0

// Package intake has the rules for the bodies of clients' requests that handlers share.
package intake

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"
)

// Fault is why a body is not taken.
type Fault struct {
	Code    string // as pdflow has it
	Message string // safe to show a client
	Err     error  // cause
}

// Gone is the code of a client that left.
const Gone = "client_gone"

// ErrTooLarge is the error of a body above the limit.
var ErrTooLarge = errors.New("pdflow: larger than the limit")

// ErrNoMemory is the error of a body for which a Taker has nothing left.
var ErrNoMemory = errors.New("pdflow: the budget of bytes in flight is used up")

// Taker takes bytes of a budget. size is that of the body they are for, as far as it is known. It returns false if so
// many are not left. A nil Taker has any number.
type Taker func(bytes, size int64) bool

func (t Taker) take(n, size int) error {
	if t == nil || t(int64(n), int64(size)) {
		return nil
	}
	return ErrNoMemory
}

// Read reads a request's body whole before anything else: only then net/http notices a client that leaves, and an
// engine's connection is not torn down with the client's body (docs/go-facts.md §1). A body must be JSON; an optional
// one may be missing, and its caller looks at its form: see [CheckJSON]. limit is in bytes; a timeout of 0 is none. A
// body that fills the memory which it holds too slowly is ended earlier: see pace. After a fault net/http closes the
// connection. Without w there is no timeout, and nothing to close.
func Read(w http.ResponseWriter, r *http.Request, limit int64, timeout time.Duration, optional bool,
	budget Taker) ([]byte, *Fault) {
	if w == nil {
		return read(r, limit, optional, budget, nil)
	}
	p := pace{w: w, timeout: timeout}
	limited := p.begin()
	body, fault := read(r, limit, optional, budget, &p)
	switch {
	case fault != nil && fault.Code != Gone:
		Closing(w, r) // with a deadline for what is left of the body
	case limited:
		_ = p.set(time.Time{})
	}
	return body, fault
}

func read(r *http.Request, limit int64, optional bool, budget Taker, p *pace) ([]byte, *Fault) {
	if !optional {
		if fault := CheckJSON(r.Header); fault != nil {
			return nil, fault
		}
	}
	if r.ContentLength > limit {
		return nil, TooLarge(limit)
	}
	if r.Body == nil {
		if optional {
			return nil, nil
		}
		return nil, &Fault{Code: "invalid_request", Message: "the request has no body"}
	}
	length := r.ContentLength
	if length == 0 {
		length = -1 // of a client's request, 0 beside a body is an unknown length
	}
	body, err := readAll(r.Body, length, limit, budget, p)
	switch {
	case err == nil && len(body) == 0:
		return nil, nil
	case err == nil:
		return body, nil
	case errors.Is(err, ErrTooLarge):
		return nil, TooLarge(limit)
	case errors.Is(err, ErrNoMemory):
		return nil, &Fault{Code: "overloaded", Message: "too many large requests at the same time", Err: err}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, Late()
	case r.Context().Err() != nil:
		return nil, &Fault{Code: Gone, Err: err}
	}
	return nil, &Fault{Code: "invalid_request", Message: "the body could not be read to its end", Err: err}
}

// Late is the fault of a body that did not end in time.
func Late() *Fault { return &Fault{Code: "body_timeout", Message: "the body did not come in time"} }

// TooLarge is the fault of a body above a limit, in bytes.
func TooLarge(limit int64) *Fault {
	return &Fault{Code: "body_too_large", Message: "the body is larger than " + strconv.FormatInt(limit, 10) + " bytes"}
}

// believed is how much memory an announced length is given before any byte has come, in bytes. Each byte that has come
// is believed to have perByte more behind it.
const (
	believed = 16 << 10
	perByte  = 8
)

// ReadAll reads r to its end, up to limit bytes. length is what it announces, -1 if nothing. Who lies about it must not
// cost memory, so the buffer grows towards it with what has come. Memory is taken of the budget before it is allocated.
func ReadAll(r io.Reader, length, limit int64, budget Taker) ([]byte, error) {
	return readAll(r, length, limit, budget, nil)
}

func readAll(r io.Reader, length, limit int64, budget Taker, p *pace) ([]byte, error) {
	if length > limit {
		return nil, ErrTooLarge
	}
	if length < 0 {
		return readPieces(r, limit, budget, p)
	}
	size := length
	for size > believed {
		size = (size + perByte - 1) / perByte // the buffers before the last, whole one are a seventh of it together
	}
	for b := []byte(nil); ; size = min(length, size*perByte) {
		if err := budget.take(int(size)-cap(b), int(length)); err != nil {
			return nil, err
		}
		p.holds(int(size) - len(b))
		var err error
		switch b, err = fill(r, append(uncleared(int(size)), b...), p); {
		case int64(len(b)) == length:
			return b, nil
		case errors.Is(err, io.EOF) && len(b) > 0:
			return b, io.ErrUnexpectedEOF
		case err != nil:
			return b, err
		}
	}
}

// uncleared returns an empty slice with room for n bytes, which hold anything: only what a Read says that it has
// written may be looked at. To clear the buffer of a body of 1 MB, which is then read into it, takes 4 % of its
// request's time. The string that lends its bytes is nobody's, so that they may change.
func uncleared(n int) []byte {
	var b strings.Builder
	b.Grow(max(n, 1)) // package strings does not clear what it allocates
	b.WriteByte(0)    // so that the string has an address
	return unsafe.Slice(unsafe.StringData(b.String()), n)[:0]
}

// The sizes of pieces, in bytes: each is twice as large as the one before.
const (
	firstPiece = 4 << 10
	mostPiece  = 1 << 20
)

// readPieces reads what announces no length. It keeps pieces until the end is known: a buffer that grows leaves twice
// its bytes behind, and for a response that turns out too large all of that is for nothing.
func readPieces(r io.Reader, limit int64, budget Taker, p *pace) ([]byte, error) {
	var pieces [][]byte
	total := 0
	for size := firstPiece; ; size = min(2*size, mostPiece) {
		if err := budget.take(size, total+size); err != nil {
			return nil, err
		}
		p.holds(size)
		piece, err := fill(r, make([]byte, 0, size), p)
		pieces, total = append(pieces, piece), total+len(piece)
		if int64(total) > limit {
			return nil, ErrTooLarge
		}
		if err == nil {
			continue
		}
		if len(pieces) > 1 {
			piece = bytes.Join(pieces, nil)
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return piece, err
	}
}

// maxEmpty is how many reads in a row may give neither bytes nor an error, as in package bufio.
const maxEmpty = 100

// fill reads until b's capacity is used up or r fails. io.ReadFull would not tell r's end from r's own
// io.ErrUnexpectedEOF, which is that of a response that was cut.
func fill(r io.Reader, b []byte, p *pace) ([]byte, error) {
	empty := 0
	for len(b) < cap(b) {
		n, err := r.Read(b[len(b):cap(b)])
		if b = b[:len(b)+n]; err != nil {
			return b, err
		}
		if empty++; n > 0 {
			empty = 0
		} else if empty == maxEmpty {
			return b, io.ErrNoProgress
		}
		if len(b) < cap(b) {
			p.came(n)
		}
	}
	return b, nil
}

// CheckJSON wants the header of JSON: bodies in another form or encoding could not be looked through for transfer
// members.
func CheckJSON(h http.Header) *Fault {
	if types := h["Content-Type"]; len(types) != 1 || !isJSON(types[0]) {
		return &Fault{Code: "unsupported_media_type", Message: "Content-Type must be application/json"}
	}
	return CheckEncoding(h)
}

// CheckEncoding refuses the header of a compressed body.
func CheckEncoding(h http.Header) *Fault {
	if Encoded(h) {
		return &Fault{Code: "unsupported_media_type", Message: "Content-Encoding must be identity"}
	}
	return nil
}

// Encoded reports whether a header is that of a compressed body.
func Encoded(h http.Header) bool {
	return slices.ContainsFunc(h["Content-Encoding"], func(encoding string) bool {
		return encoding != "" && !strings.EqualFold(encoding, "identity")
	})
}

func isJSON(contentType string) bool {
	if contentType == "application/json" {
		return true
	}
	media, _, err := mime.ParseMediaType(contentType)
	return media == "application/json" && (err == nil || errors.Is(err, mime.ErrInvalidMediaParameter))
}

// leftover is for how long net/http may read what is left of the body of a request that has failed.
const leftover = time.Second

// Closing makes net/http close the connection after a response that leaves some of the body unread. net/http reads on
// for a while, so that the client sees the response. Without a deadline a slow client would hold the connection for
// ever. Where the client asked for the connection's end, [Linger] must follow the response.
//
// Over HTTP/2 only the stream ends: its connection may carry the requests of many clients, and its end drops those that
// are on their way.
func Closing(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor < 2 {
		w.Header().Set("Connection", "close")
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(leftover))
}

// Linger follows an error response. Where the client asked for the connection's end (Connection: close, HTTP/1.0),
// net/http closes at once and leaves what is left of the body unread. The kernel then answers the client's next bytes
// with a reset, and the client may never see the response. So Linger sends it and reads on, for leftover at most.
func Linger(w http.ResponseWriter, r *http.Request) {
	if !r.Close || r.ProtoMajor != 1 || r.Body == nil {
		return
	}
	rc := http.NewResponseController(w)
	if rc.Flush() == nil && rc.SetReadDeadline(time.Now().Add(leftover)) == nil {
		_, _ = io.Copy(io.Discard, r.Body)
	}
}
