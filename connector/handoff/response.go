// SPDX-License-Identifier: Apache-2.0

// Package handoff reads and checks what a prefill engine's response says of its KV, before it reaches a decode engine
// that would hang or die of it. Errors are [connector.ErrNoTransfer]; they name keys and headers, never values.
//
// A connector reads the handoff where it has declared it ([connector.Handoff]), with [Member] or [Header], asks of each
// key what the decode engine needs ([Read]), and hands the bytes on as they are.
package handoff

import (
	"encoding/json"
	"net/http"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// Member returns a top-level member of P's response, byte for byte, if check finds no fault with it; nil checks
// nothing. The error is [connector.ErrNoTransfer], also where P has not answered, or the response is not one JSON
// object.
func Member(p *connector.PrefillResult, name string, check func(raw json.RawMessage) error) (json.RawMessage, error) {
	if p == nil {
		return nil, errNotAnswered
	}
	if p.Err() != nil {
		return nil, connector.NoTransfer("the answer is not one JSON object")
	}
	raw, ok := p.Field(name)
	if !ok {
		return nil, connector.NoTransfer("%s is absent or null: prefill did not end as it must", name)
	}
	if check == nil {
		return raw, nil
	}
	if err := check(raw); err != nil {
		return nil, connector.NoTransfer("%s: %v", name, err)
	}
	return raw, nil
}

// Header returns a header of P's response. The error is [connector.ErrNoTransfer] unless P has answered with exactly one value of it, which is
// visible ASCII, of 8 KiB at most: proxies such as nginx take no longer header by default.
func Header(p *connector.PrefillResult, name string) (string, error) {
	if p == nil {
		return "", errNotAnswered
	}
	values := p.Header[http.CanonicalHeaderKey(name)]
	switch {
	case len(values) == 0 || values[0] == "":
		return "", connector.NoTransfer("the header %s is absent: prefill did not end as it must", name)
	case len(values) > 1:
		return "", connector.NoTransfer("the header %s stands there more than once", name)
	case strings.ContainsFunc(values[0], func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", connector.NoTransfer("the header %s is not visible ASCII", name)
	case len(values[0]) > maxHeader:
		return "", connector.NoTransfer("the header %s is too long", name)
	}
	return values[0], nil
}

const maxHeader = 8 << 10

var errNotAnswered = connector.NoTransfer("decode was described before prefill answered")
