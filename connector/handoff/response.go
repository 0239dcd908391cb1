// SPDX-License-Identifier: Apache-2.0

// Package handoff reads and checks what a prefill engine's response says about its KV, before a decode engine gets it
// that would hang or die of a wrong one. Errors are [connector.ErrNoTransfer]; they name keys and headers, never
// values.
//
// A connector declares where the handoff is ([connector.Handoff]) and reads it there, with [Member] or [Header]. It
// checks the keys that the decode engine needs ([Read]), and passes the bytes on unchanged. To all checks, a key
// that is null is as one that is absent: releases differ in which optional keys they write as null.
package handoff

import (
	"encoding/json"
	"net/http"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// Member returns a top-level member of P's response, byte for byte, if check finds no fault in it. A nil check checks
// nothing. The error is [connector.ErrNoTransfer], also if P has not answered or its response is not one JSON object.
func Member(p *connector.PrefillResult, name string, check func(raw json.RawMessage) error) (json.RawMessage, error) {
	if p == nil {
		return nil, errNotAnswered
	}
	if p.Err() != nil {
		return nil, NoTransfer("the response is not one JSON object")
	}
	raw, ok := p.Field(name)
	if !ok {
		return nil, NoTransfer("%s is absent or null: prefill did not end as it must", name)
	}
	if check == nil {
		return raw, nil
	}
	if err := check(raw); err != nil {
		return nil, NoTransfer("%s: %v", name, err)
	}
	return raw, nil
}

// Header returns a header of P's response. P must have answered with exactly one value, of visible ASCII and at most 8
// KiB: proxies such as nginx accept no longer header by default. Otherwise the error is [connector.ErrNoTransfer].
func Header(p *connector.PrefillResult, name string) (string, error) {
	if p == nil {
		return "", errNotAnswered
	}
	values := p.Header[http.CanonicalHeaderKey(name)]
	switch {
	case len(values) == 0 || values[0] == "":
		return "", NoTransfer("the header %s is absent: prefill did not end as it must", name)
	case len(values) > 1:
		return "", NoTransfer("the header %s stands there more than once", name)
	case strings.ContainsFunc(values[0], func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", NoTransfer("the header %s is not visible ASCII", name)
	case len(values[0]) > maxHeader:
		return "", NoTransfer("the header %s is too long", name)
	}
	return values[0], nil
}

const maxHeader = 8 << 10

var errNotAnswered = NoTransfer("decode was described before prefill answered")
