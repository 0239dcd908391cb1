// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// Faults of a response's head. Where HTTP lets a reader be lenient, two readers could see different ends of one
// response, so these are errors. They hold nothing of the response.
var (
	errNotHTTP     = errors.New("transport: the response is not HTTP/1")
	errHeadTooLong = errors.New("transport: the response's head is too long")
	errMalformed   = errors.New("transport: malformed header field in the response")
	errFolded      = errors.New("transport: folded header field in the response")
	errLength      = errors.New("transport: Content-Length of the response is not one number")
	errEncoding    = errors.New("transport: Transfer-Encoding of the response is not chunked alone")
	errLengthTwice = errors.New("transport: the response has both Content-Length and Transfer-Encoding")
	errTrailerName = errors.New("transport: the response announces a trailer that cannot be one")
	errSwitch      = errors.New("transport: the engine switched protocols")
	errInterim     = errors.New("transport: too many interim responses")
)

// maxInterim is the largest number of interim responses (1xx) to one request.
const maxInterim = 8

// head is a response's head, with what frames the body.
type head struct {
	status  string // "200 OK"
	code    int
	minor   int // of HTTP/1
	header  http.Header
	trailer http.Header // names announced

	close   bool
	chunked bool
	length  int64 // of the body; -1 if its chunks or the connection end it
	told    int64 // http.Response.ContentLength
}

// readHead reads the head of the final response to a request with method.
func (c *conn) readHead(method string) (*head, error) {
	for range maxInterim + 1 {
		text, err := c.readHeadText()
		if err != nil {
			return nil, err
		}
		h := new(head)
		kept := string(text)
		c.take(len(text))
		if err := h.parse(kept, method); err != nil {
			return nil, err
		}
		if h.code == http.StatusSwitchingProtocols {
			return nil, errSwitch // nobody here writes to an engine outside of requests
		}
		if h.code >= 200 {
			return h, nil
		}
	}
	return nil, errInterim
}

// readHeadText reads a head up to and with its empty line. It stays in the buffer, which the caller takes it from.
func (c *conn) readHeadText() ([]byte, error) {
	limit := c.t.options.MaxResponseHeaderBytes
	seen := 0
	for {
		b := c.buffered()
		if !mayBeHTTP(b) {
			return nil, errNotHTTP
		}
		end := headEnd(b, seen)
		if int64(end) > limit || end < 0 && int64(len(b)) >= limit {
			return nil, errHeadTooLong
		}
		if end >= 0 {
			return b[:end], nil
		}
		seen = max(len(b)-2, 0)
		if _, err := c.fill(); err != nil {
			if err == io.EOF && len(b) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
}

const version = "HTTP/1."

// mayBeHTTP reports whether b can begin a response, so that the greeting of another protocol fails at once.
func mayBeHTTP(b []byte) bool {
	n := min(len(b), len(version))
	return string(b[:n]) == version[:n]
}

// headEnd returns the index after the empty line that ends a head, or -1. Lines may end without CR, as net/http allows.
// The search begins at from.
func headEnd(b []byte, from int) int {
	for from < len(b) {
		i := bytes.IndexByte(b[from:], '\n')
		if i < 0 {
			return -1
		}
		from += i + 1
		switch rest := b[from:]; {
		case len(rest) > 0 && rest[0] == '\n':
			return from + 1
		case len(rest) > 1 && rest[0] == '\r' && rest[1] == '\n':
			return from + 2
		}
	}
	return -1
}

// cutLine returns the first line without its end, and the rest.
func cutLine(s string) (line, rest string) {
	i := strings.IndexByte(s, '\n')
	if i < 0 {
		return s, ""
	}
	line, rest = s[:i], s[i+1:]
	if i > 0 && s[i-1] == '\r' {
		line = s[:i-1]
	}
	return line, rest
}

// parse reads a whole head. Values are parts of text, so that one allocation serves all.
func (h *head) parse(text, method string) error {
	line, fields := cutLine(text)
	if !h.parseStatus(line) {
		return errNotHTTP
	}
	h.header = make(http.Header, min(strings.Count(fields, "\n"), 32))
	if err := parseFields(fields, h.header); err != nil {
		return err
	}
	return h.frame(method)
}

func (h *head) parseStatus(line string) bool {
	rest, ok := strings.CutPrefix(line, version)
	if !ok || len(rest) < len("1 200") || rest[0] != '0' && rest[0] != '1' || rest[1] != ' ' {
		return false
	}
	h.minor = int(rest[0] - '0')
	h.status = rest[2:]
	if len(h.status) > 3 && h.status[3] != ' ' || !only(h.status, valueBytes) {
		return false
	}
	for _, digit := range []byte(h.status[:3]) {
		if digit < '0' || digit > '9' {
			return false
		}
		h.code = 10*h.code + int(digit-'0')
	}
	return h.code >= 100
}

// parseFields adds the fields of text to header. The fields end with an empty line or with the text.
func parseFields(text string, header http.Header) error {
	var room []string // for the values of fields with one value, as most have
	for text != "" {
		var line string
		if line, text = cutLine(text); line == "" {
			return nil
		}
		if line[0] == ' ' || line[0] == '\t' {
			return errFolded
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok || name == "" || !only(name, tokenBytes) {
			return errMalformed
		}
		if value = trimSpace(value); !only(value, valueBytes) {
			return errMalformed
		}
		name = canonical(name)
		if values, ok := header[name]; ok {
			header[name] = append(values, value)
			continue
		}
		if len(room) == 0 {
			room = make([]string, min(strings.Count(text, "\n")+1, 32))
		}
		room[0] = value
		header[name], room = room[:1:1], room[1:]
	}
	return nil
}

// canonical returns http.CanonicalHeaderKey(name), without an allocation for the names that engines send in lower case.
func canonical(name string) string {
	if known, ok := lowerNames[name]; ok {
		return known
	}
	return http.CanonicalHeaderKey(name)
}

var lowerNames = func() map[string]string {
	names := make(map[string]string)
	for _, name := range []string{
		"Cache-Control", "Connection", "Content-Encoding", "Content-Length", "Content-Type", "Date", "Keep-Alive",
		"Retry-After",
		"Server", "Trailer", "Transfer-Encoding", "Vary", "X-Accel-Buffering", "X-Request-Id",
	} {
		names[strings.ToLower(name)] = name
	}
	return names
}()

// frame finds where the body ends (RFC 9112, 6.3), and removes the fields from the header that net/http removes.
func (h *head) frame(method string) error {
	lengths := h.header["Content-Length"]
	length, err := parseLength(lengths)
	if err != nil {
		return err
	}
	if len(lengths) > 1 {
		h.header["Content-Length"] = lengths[:1]
	}
	if encodings, ok := h.header["Transfer-Encoding"]; ok {
		switch {
		case h.minor == 0 || len(encodings) != 1 || !strings.EqualFold(encodings[0], "chunked"):
			return errEncoding
		case len(lengths) > 0:
			return errLengthTwice
		}
		delete(h.header, "Transfer-Encoding")
		h.chunked = true
		if err := h.announced(); err != nil {
			return err
		}
	}
	connection := h.header["Connection"]
	h.close = hasToken(connection, "close")
	if h.minor == 0 {
		h.close = h.close || !hasToken(connection, "keep-alive")
	} else if h.close {
		delete(h.header, "Connection")
	}
	h.length, h.told = length, length
	switch {
	case method == http.MethodHead:
		h.length = 0
	case h.code < 200 || h.code == http.StatusNoContent || h.code == http.StatusNotModified:
		h.length, h.told = 0, 0
	case length < 0 && !h.chunked:
		h.close = true
	}
	return nil
}

// parseLength returns -1 if there is no value. Equal values count as one.
func parseLength(values []string) (int64, error) {
	if len(values) == 0 {
		return -1, nil
	}
	for _, v := range values[1:] {
		if v != values[0] {
			return 0, errLength
		}
	}
	n, err := strconv.ParseUint(values[0], 10, 63)
	if err != nil {
		return 0, errLength
	}
	return int64(n), nil
}

// announced sets the trailer to the names in the Trailer field.
func (h *head) announced() error {
	for _, list := range h.header["Trailer"] {
		for list != "" {
			var name string
			name, list, _ = strings.Cut(list, ",")
			switch name = http.CanonicalHeaderKey(trimSpace(name)); name {
			case "":
				continue
			case "Transfer-Encoding", "Trailer", "Content-Length":
				return errTrailerName
			}
			if h.trailer == nil {
				h.trailer = make(http.Header)
			}
			h.trailer[name] = nil
		}
	}
	delete(h.header, "Trailer")
	return nil
}
