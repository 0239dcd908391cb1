// SPDX-License-Identifier: Apache-2.0

package transport

import "strings"

// The bytes that parts of a head may consist of, as bits of byteKinds.
const (
	tokenBytes  uint8 = 1 << iota // of names and methods: RFC 9110, 5.6.2
	valueBytes                    // of field values: RFC 9110, 5.5
	targetBytes                   // of a request's target: no space and no control character
	hostBytes                     // of a host with its port: RFC 3986, 3.2.2
)

var byteKinds = func() (kinds [256]uint8) {
	for i := range kinds {
		b := byte(i)
		letter := b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9'
		if letter || strings.IndexByte("!#$%&'*+-.^_`|~", b) >= 0 {
			kinds[i] |= tokenBytes
		}
		if b >= ' ' && b != 0x7f || b == '\t' {
			kinds[i] |= valueBytes
		}
		if b > ' ' && b != 0x7f {
			kinds[i] |= targetBytes
		}
		if letter || strings.IndexByte("!$%&'()*+,-.:;=[]_~", b) >= 0 {
			kinds[i] |= hostBytes
		}
	}
	return kinds
}()

// only reports whether all bytes of s are of a kind.
func only(s string, kind uint8) bool {
	for i := range len(s) {
		if byteKinds[s[i]]&kind == 0 {
			return false
		}
	}
	return true
}
