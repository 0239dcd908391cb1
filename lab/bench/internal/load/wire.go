// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// head holds what is needed of an HTTP/1.1 message's head. It is reused for the next message.
type head struct {
	line        []byte // request or status line, without its end
	contentType []byte
	length      int64 // of the body; -1: chunked
	framed      bool  // the head has Content-Length or Transfer-Encoding
}

// read parses the next head.
func (h *head) read(br *bufio.Reader) error {
	line, err := br.ReadSlice('\n')
	if err != nil {
		return err
	}
	h.line = append(h.line[:0], bytes.TrimRight(line, "\r\n")...)
	h.contentType = h.contentType[:0]
	h.length, h.framed = 0, false
	for {
		if line, err = br.ReadSlice('\n'); err != nil {
			return noEOF(err)
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return nil
		}
		name, value, ok := bytes.Cut(line, []byte{':'})
		if !ok {
			return errors.New("a header line has no colon")
		}
		value = bytes.TrimSpace(value)
		switch { // the length is compared first: most headers differ in it already
		case len(name) == len("Content-Length") && bytes.EqualFold(name, []byte("Content-Length")):
			n, ok := digits(value)
			if !ok {
				return errors.New("Content-Length is not a number")
			}
			h.length, h.framed = int64(n), true
		case len(name) == len("Transfer-Encoding") && bytes.EqualFold(name, []byte("Transfer-Encoding")):
			h.length, h.framed = -1, true
		case len(name) == len("Content-Type") && bytes.EqualFold(name, []byte("Content-Type")):
			h.contentType = append(h.contentType, value...)
		}
	}
}

// status reads the code of a status line.
func (h *head) status() (int, error) {
	if len(h.line) < len("HTTP/1.1 200") || !bytes.HasPrefix(h.line, []byte("HTTP/1.1 ")) {
		return 0, errors.New("not an HTTP/1.1 response")
	}
	code, ok := digits(h.line[9:12])
	if !ok {
		return 0, errors.New("the status is not a number")
	}
	return int(code), nil
}

// each gives the pieces of a body to sink when they come. A piece is valid until sink returns.
func (h *head) each(br *bufio.Reader, sink func(piece []byte) error) error {
	if !h.framed {
		return errors.New("the message names neither a length nor chunks")
	}
	if h.length >= 0 {
		return pieces(br, h.length, sink)
	}
	for {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return noEOF(err)
		}
		size, err := chunkSize(bytes.TrimRight(line, "\r\n"))
		if err != nil {
			return err
		}
		if err := pieces(br, size, sink); err != nil {
			return err
		}
		if line, err = br.ReadSlice('\n'); err != nil {
			return noEOF(err)
		}
		if len(bytes.TrimRight(line, "\r\n")) != 0 {
			return errors.New("a chunk is longer than it says, or a trailer came")
		}
		if size == 0 {
			return nil
		}
	}
}

func chunkSize(line []byte) (int64, error) {
	var size int64
	for _, c := range line {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, errors.New("a chunk's size is not a number")
		}
		size = size<<4 | int64(c)
	}
	if len(line) == 0 || len(line) > 8 {
		return 0, errors.New("a chunk has no sensible size")
	}
	return size, nil
}

func pieces(br *bufio.Reader, n int64, sink func([]byte) error) error {
	for n > 0 {
		if _, err := br.Peek(1); err != nil {
			return noEOF(err)
		}
		piece, err := br.Peek(int(min(n, int64(br.Buffered()))))
		if err != nil {
			return err
		}
		if err := sink(piece); err != nil {
			return err
		}
		n -= int64(len(piece))
		if _, err := br.Discard(len(piece)); err != nil {
			return err
		}
	}
	return nil
}

// body reads a whole body into dst, or into new memory if dst is too small.
func (h *head) body(br *bufio.Reader, dst []byte) ([]byte, error) {
	if h.length >= 0 {
		n := int(h.length)
		if cap(dst) < n {
			dst = make([]byte, n)
		}
		_, err := io.ReadFull(br, dst[:n])
		return dst[:n], noEOF(err)
	}
	dst = dst[:0]
	err := h.each(br, func(piece []byte) error {
		dst = append(dst, piece...)
		return nil
	})
	return dst, err
}

// noEOF turns io.EOF inside a message into io.ErrUnexpectedEOF.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// appendRequestHead writes the head of a POST request as a common client does. The body follows.
func appendRequestHead(dst []byte, host string, length int) []byte {
	return fmt.Appendf(dst, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nAccept: application/json\r\n"+
		"Authorization: Bearer bench\r\nContent-Type: application/json\r\nUser-Agent: OpenAI/Python 2.8.0\r\n"+
		"Content-Length: %d\r\n\r\n", host, length)
}
