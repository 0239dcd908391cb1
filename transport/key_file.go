// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/http"

	"github.com/pdkit/pdkit/internal/reread"
)

// KeyFile returns the header that has the key of a file, as Authorization: Bearer KEY: what engines want that were
// started with --api-key (vLLM, SGLang). White space around the key is left out.
//
// When the file has changed, the next call reads it again. While the new contents cannot be used (it may be half
// written), the last key stays in use. Errors name the file and the reason, never what is in it. The header is the
// same map until the file changes; nobody may change it. The function may be called concurrently.
func KeyFile(path string) (func() http.Header, error) {
	file := reread.File{What: "key file", Path: path}
	files, err := opened(reread.Open(func(contents [][]byte) (http.Header, error) {
		key := bytes.TrimSpace(contents[0])
		if len(key) == 0 || bytes.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, fmt.Errorf("%s %s: %w", file.What, file.Path, errNoKey)
		}
		return http.Header{"Authorization": {"Bearer " + string(key)}}, nil
	}, file))
	if err != nil {
		return nil, err
	}
	return files.Get, nil
}

var errNoKey = errors.New("wants one key, of visible ASCII characters without white space between")

// WithHeader returns a round tripper that adds the fields of header to requests that do not have them. A request that
// has a field without a value ("Authorization": nil) gets none. It is for what a host asks engines itself
// ([github.com/pdkit/pdkit/discovery/inspect], health probes, tokens of prompts …): a client's request needs the
// client's own key. header is called for each request; it and next may be called concurrently.
func WithHeader(next http.RoundTripper, header func() http.Header) http.RoundTripper {
	return withHeader{next, header}
}

type withHeader struct {
	next   http.RoundTripper
	header func() http.Header
}

// RoundTrip sends a copy of the request, since a round tripper must not change it.
func (w withHeader) RoundTrip(r *http.Request) (*http.Response, error) {
	own := *r
	own.Header = maps.Clone(w.header())
	if own.Header == nil {
		return w.next.RoundTrip(r)
	}
	maps.Copy(own.Header, r.Header)
	return w.next.RoundTrip(&own)
}
