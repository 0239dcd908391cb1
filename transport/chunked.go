// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"net/http"
	"unicode"
)

var (
	errChunk       = errors.New("transport: malformed chunk in the response")
	errChunkWaste  = errors.New("transport: the response's chunks carry too little")
	errTrailerLong = errors.New("transport: the response's trailer is too long")
)

const (
	maxChunkLine  = 4095     // bytes of a chunk's size and extensions
	maxTrailer    = 16 << 10 // bytes
	maxChunkWaste = 16 << 10 // bytes of framing that may come in addition to what many small chunks need
)

// chunks decodes the chunked transfer coding (RFC 9112, 7.1). Input and output may be cut anywhere. Its rules are those
// of net/http, which accepts no bare LF here.
type chunks struct {
	state   chunkState
	size    uint64 // of the chunk, then of its rest
	digits  int
	line    int // bytes of the chunk's line so far
	waste   int64
	trailer []byte
}

type chunkState uint8

const (
	chunkSize chunkState = iota
	chunkSpace
	chunkExtension
	chunkLineLF
	chunkData
	chunkDataCR
	chunkDataLF
	chunkTrailer
	chunkDone
)

// decode moves data from src to dst. Both may be the same memory, since decoded data is never longer than its source.
// decode stops when dst is full, and returns io.EOF after the last chunk.
func (d *chunks) decode(dst, src []byte) (n, used int, err error) {
	for d.state != chunkDone {
		if used == len(src) {
			return n, used, nil
		}
		if d.state == chunkData {
			room := min(len(dst)-n, len(src)-used)
			if uint64(room) > d.size {
				room = int(d.size)
			}
			if room == 0 {
				return n, used, nil
			}
			copy(dst[n:], src[used:used+room])
			n, used, d.size = n+room, used+room, d.size-uint64(room)
			if d.size == 0 {
				d.state = chunkDataCR
			}
			continue
		}
		plain, err := d.plainLine(src[used:])
		if plain == 0 && err == nil {
			plain, err = 1, d.step(src[used])
		}
		if err != nil {
			return n, used, err
		}
		used += plain
	}
	return n, used, io.EOF
}

// plainLine handles at once what comes between the data of most chunks: the end of one, and the size of the next
// without an extension. It returns how many bytes that is, or 0 if step must handle the next byte.
func (d *chunks) plainLine(src []byte) (int, error) {
	digits := src
	switch {
	case d.state == chunkDataCR && len(src) > 2 && src[0] == '\r' && src[1] == '\n':
		digits = src[2:]
	case d.state != chunkSize || d.digits > 0:
		return 0, nil
	}
	size, n := uint64(0), 0
	for n < min(len(digits), 8) && hexDigits[digits[n]] > 0 {
		size = size<<4 | uint64(hexDigits[digits[n]]-1)
		n++
	}
	if n == 0 || len(digits) < n+2 || digits[n] != '\r' || digits[n+1] != '\n' {
		return 0, nil
	}
	d.size, d.digits, d.line = size, n, n
	return len(src) - len(digits) + n + 2, d.begin()
}

// hexDigits holds 1 more than the value of each hexadecimal digit, and 0 for all other bytes.
var hexDigits = func() (values [256]uint8) {
	for value, digit := range "0123456789abcdef" {
		values[digit] = uint8(value) + 1
		values[unicode.ToUpper(digit)] = uint8(value) + 1
	}
	return values
}()

// step handles one byte that is not data.
func (d *chunks) step(b byte) error {
	switch d.state {
	case chunkDataCR, chunkDataLF:
		if d.state == chunkDataCR && b == '\r' {
			d.state = chunkDataLF
			return nil
		}
		if d.state == chunkDataLF && b == '\n' {
			d.state, d.size, d.digits, d.line = chunkSize, 0, 0, 0
			return nil
		}
		return errChunk
	case chunkLineLF:
		if b != '\n' {
			return errChunk
		}
		return d.begin()
	case chunkTrailer:
		return d.stepTrailer(b)
	}
	if d.line++; b == '\r' {
		if d.digits == 0 {
			return errChunk
		}
		d.line--
		d.state = chunkLineLF
		return nil
	}
	if d.line > maxChunkLine {
		return errChunk
	}
	switch {
	case b == '\n':
		return errChunk
	case d.state == chunkExtension:
		return nil
	case b == ' ' || b == '\t':
		d.state = chunkSpace // space is allowed before the end of the line only
		return nil
	case d.state == chunkSpace:
		return errChunk
	case b == ';':
		d.state = chunkExtension
		return nil
	}
	return d.digit(b)
}

func (d *chunks) digit(b byte) error {
	value := hexDigits[b]
	if value == 0 {
		return errChunk
	}
	const most = 1 << 62 // no response has a larger size
	if d.digits++; d.digits > 16 {
		return errChunk
	}
	if d.size = d.size<<4 | uint64(value-1); d.size >= most {
		return errChunk
	}
	return nil
}

// begin starts a chunk after its line. It accepts chunks of one byte, which streams have, but not endless extensions.
func (d *chunks) begin() error {
	if d.state = chunkData; d.size == 0 {
		d.state = chunkTrailer
	}
	d.waste = max(d.waste+int64(d.line)+2-16-2*int64(min(d.size, maxChunkWaste)), 0)
	if d.waste > maxChunkWaste {
		return errChunkWaste
	}
	return nil
}

// stepTrailer collects the trailer until its empty line.
func (d *chunks) stepTrailer(b byte) error {
	last := byte(0)
	if n := len(d.trailer); n > 0 {
		last = d.trailer[n-1]
	}
	if (b == '\n') != (last == '\r') {
		return errMalformed
	}
	if d.trailer = append(d.trailer, b); len(d.trailer) > maxTrailer {
		return errTrailerLong
	}
	if len(d.trailer) == 2 && b == '\n' || bytes.HasSuffix(d.trailer, []byte("\r\n\r\n")) {
		d.state = chunkDone
	}
	return nil
}

// addTrailer adds the fields of a decoded body's trailer.
func (d *chunks) addTrailer(to *http.Header) error {
	if len(d.trailer) <= 2 {
		return nil
	}
	fields := make(http.Header)
	if err := parseFields(string(d.trailer), fields); err != nil {
		return err
	}
	if *to == nil {
		*to = make(http.Header, len(fields))
	}
	maps.Copy(*to, fields)
	return nil
}
