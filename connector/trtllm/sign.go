// SPDX-License-Identifier: Apache-2.0

package trtllm

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"hash"
	"sync"
	"unicode/utf16"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

const authHeader = "X-Trtllm-Disagg-Auth"

// signer signs with one key. A nil signer signs nothing.
type signer struct {
	key  []byte
	macs sync.Pool // of hash.Hash that already have the key
}

func newSigner(key string) *signer {
	if key == "" {
		return nil
	}
	return &signer{key: []byte(key)}
}

// sign returns the header's value for D's parameters. It is "" if they need none or there is no key. The signature is
// the HMAC-SHA256 of the two protected members in the form of Python's json.dumps(…, sort_keys=True, separators=(",",
// ":")) (tensorrt_llm/serve/disagg_auth.py; versions that sign other fields are unreleased).
func (s *signer) sign(params json.RawMessage) (signature string, err error) {
	if s == nil {
		return "", nil
	}
	ok, err := withObject(params, func(d *jsonedit.Doc) error {
		endpoint, has := given(d, "ctx_info_endpoint")
		state, hasState := given(d, "encoded_opaque_state")
		if !has && !hasState {
			return nil
		}
		if has && jsonedit.Kind(endpoint) == jsonedit.Array {
			endpoint = json.RawMessage(gjson.GetBytes(endpoint, "0").Raw)
		}
		payload := append(make([]byte, 0, 64+len(endpoint)+len(state)), `{"ctx_info_endpoint":`...)
		payload, err := appendPython(payload, endpoint, "ctx_info_endpoint")
		if err != nil {
			return err
		}
		payload = append(payload, `,"encoded_opaque_state":`...)
		if payload, err = appendPython(payload, state, "encoded_opaque_state"); err != nil {
			return err
		}
		signature = s.mac(append(payload, '}'))
		return nil
	})
	if !ok {
		return "", handoff.NoTransfer("disaggregated_params is not an object without duplicate members")
	}
	return signature, err
}

func (s *signer) mac(payload []byte) string {
	mac, ok := s.macs.Get().(hash.Hash)
	if !ok {
		mac = hmac.New(sha256.New, s.key)
	}
	defer s.macs.Put(mac)
	mac.Reset()
	mac.Write(payload)
	const prefix = "sha256="
	out := append(make([]byte, 0, len(prefix)+2*sha256.Size), prefix...)
	var sum [sha256.Size]byte
	return string(hex.AppendEncode(out, mac.Sum(sum[:0])))
}

// appendPython writes a JSON string, or null for none, as Python does: it escapes everything except printable ASCII.
func appendPython(dst []byte, raw json.RawMessage, name string) ([]byte, error) {
	if len(raw) == 0 || jsonedit.Kind(raw) == jsonedit.Null {
		return append(dst, "null"...), nil
	}
	if jsonedit.Kind(raw) != jsonedit.String {
		return nil, handoff.NoTransfer("%s is not a string", name)
	}
	if plain(raw) { // base64 and addresses are always plain
		return append(dst, raw...), nil
	}
	s, err := jsonedit.Unquote(raw)
	if err != nil {
		return nil, handoff.NoTransfer("%s is not a string of valid characters", name)
	}
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r >= ' ' && r <= '~':
			dst = append(dst, byte(r))
		case r == '\n':
			dst = append(dst, `\n`...)
		case r == '\r':
			dst = append(dst, `\r`...)
		case r == '\t':
			dst = append(dst, `\t`...)
		case r == '\b':
			dst = append(dst, `\b`...)
		case r == '\f':
			dst = append(dst, `\f`...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			dst = appendHex(appendHex(dst, high), low)
		default:
			dst = appendHex(dst, r)
		}
	}
	return append(dst, '"'), nil
}

// plain reports whether a JSON string is already written as Python writes it: printable ASCII without escapes.
func plain(raw []byte) bool {
	for _, c := range raw {
		if c < ' ' || c > '~' || c == '\\' {
			return false
		}
	}
	return true
}

func appendHex(dst []byte, r rune) []byte {
	const digits = "0123456789abcdef"
	return append(dst, '\\', 'u', digits[r>>12&15], digits[r>>8&15], digits[r>>4&15], digits[r&15])
}
