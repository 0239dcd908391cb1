// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"cmp"
	"errors"
	"net/http"
	"strconv"
	"strings"
)

// Reasons why a request is not sent. None holds a value, since that may be a secret.
var (
	errScheme   = errors.New("transport: the URL's scheme is neither http nor https")
	errHost     = errors.New("transport: the host is missing or not one of plain ASCII")
	errTarget   = errors.New("transport: the URL has a space or a control character in it")
	errMethod   = errors.New("transport: the method cannot be sent")
	errNoHeader = errors.New("transport: the request has no URL or no header")
	errField    = errors.New("transport: a header's name or value cannot be sent")
	errTrailer  = errors.New("transport: trailers of requests cannot be sent")
)

// checkTarget refuses requests that cannot be dialed.
func checkTarget(req *http.Request) error {
	switch {
	case req.URL == nil || req.Header == nil:
		return errNoHeader
	case req.URL.Scheme != "http" && req.URL.Scheme != "https":
		return errScheme
	case req.URL.Host == "" || !only(req.URL.Host, hostBytes):
		return errHost
	case len(req.Trailer) > 0:
		return errTrailer
	}
	return nil
}

// appendHead appends the head of a request with a body of length bytes. last is true if the request asks for the
// connection's end after it.
//
// The head always gives the length by Content-Length. Framing fields of the request's header are left out, in any
// spelling, since two fields that disagree let one request be smuggled into another.
func appendHead(b []byte, req *http.Request, length int64) (head []byte, last bool, err error) {
	method := methodOf(req)
	if !only(method, tokenBytes) || method == http.MethodConnect {
		return b, false, errMethod
	}
	target := req.URL.RequestURI()
	if target == "" || !only(target, targetBytes) {
		return b, false, errTarget
	}
	host := cmp.Or(req.Host, req.URL.Host)
	if !only(host, hostBytes) {
		return b, false, errHost
	}
	b = append(append(append(b, method...), ' '), target...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(append(b, withoutZone(host)...), "\r\n"...)
	if length > 0 || method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch {
		b = append(b, "Content-Length: "...)
		b = append(strconv.AppendInt(b, length, 10), "\r\n"...)
	}
	for name, values := range req.Header {
		if !only(name, tokenBytes) || name == "" {
			return b, false, errField
		}
		if isFraming(name) {
			continue
		}
		if strings.EqualFold(name, "Connection") && hasToken(values, "close") {
			last = true
		}
		for _, value := range values {
			if !only(value, valueBytes) {
				return b, false, errField
			}
			if value = trimSpace(value); value == "" && strings.EqualFold(name, "User-Agent") {
				continue // net/http's way to say: none
			}
			b = append(append(b, name...), ": "...)
			b = append(append(b, value...), "\r\n"...)
		}
	}
	if req.Close && !last {
		b, last = append(b, "Connection: close\r\n"...), true
	}
	return append(b, "\r\n"...), last, nil
}

// isFraming reports whether name is a field that this package writes itself, or one that only makes sense with a
// chunked body.
func isFraming(name string) bool {
	switch len(name) {
	case len("Host"):
		return strings.EqualFold(name, "Host")
	case len("Trailer"):
		return strings.EqualFold(name, "Trailer")
	case len("Content-Length"):
		return strings.EqualFold(name, "Content-Length")
	case len("Transfer-Encoding"):
		return strings.EqualFold(name, "Transfer-Encoding")
	}
	return false
}

// withoutZone removes the zone from an IPv6 literal, since it has a meaning on this host only (RFC 6874, 4).
func withoutZone(host string) string {
	if !strings.HasPrefix(host, "[") {
		return host
	}
	end := strings.LastIndexByte(host, ']')
	zone := strings.IndexByte(host, '%')
	if zone < 0 || end < zone {
		return host
	}
	return host[:zone] + host[end:]
}

// hasToken reports whether a list header's values hold a token, in any case.
func hasToken(values []string, token string) bool {
	for _, v := range values {
		for v != "" {
			var part string
			part, v, _ = strings.Cut(v, ",")
			if strings.EqualFold(trimSpace(part), token) {
				return true
			}
		}
	}
	return false
}

// trimSpace removes optional whitespace as RFC 9110, 5.6.3 defines it.
func trimSpace(s string) string {
	for s != "" && (s[0] == ' ' || s[0] == '\t') {
		s = s[1:]
	}
	for s != "" && (s[len(s)-1] == ' ' || s[len(s)-1] == '\t') {
		s = s[:len(s)-1]
	}
	return s
}
