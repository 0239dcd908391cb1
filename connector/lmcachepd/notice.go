// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"bytes"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// maxMembers bounds the members of a notice's map. LMCache's map has two.
const maxMembers = 16

// readNotice reads a notice and returns its request id. LMCache encodes a msgspec.Struct with tag=True: a msgpack map
// whose member type is the class's name, ProxyNotif, or NixlProxyNotif before it was renamed. It skips members that
// later versions add. ok is false for everything else.
func readNotice(raw []byte) (id string, ok bool) {
	rest := bytes.NewReader(raw)
	d := msgpack.NewDecoder(rest)
	n, err := d.DecodeMapLen()
	if err != nil || n < 2 || n > maxMembers {
		return "", false
	}
	kind := ""
	for range n {
		name, ok := readString(d)
		if !ok {
			return "", false
		}
		switch name {
		case "type":
			if kind, ok = readString(d); !ok {
				return "", false
			}
		case "req_id":
			if id, ok = readString(d); !ok {
				return "", false
			}
		default:
			if !skip(d) {
				return "", false
			}
		}
	}
	known := kind == "ProxyNotif" || kind == "NixlProxyNotif"
	return id, known && id != "" && rest.Len() == 0
}

// readString reads a string, and only that: the decoder would also convert bytes.
func readString(d *msgpack.Decoder) (string, bool) {
	c, err := d.PeekCode()
	if err != nil || !msgpcode.IsString(c) {
		return "", false
	}
	s, err := d.DecodeString()
	return s, err == nil
}

// skip skips a value that is not a container. LMCache sends no containers, and nested ones would use up the stack.
func skip(d *msgpack.Decoder) bool {
	c, err := d.PeekCode()
	if err != nil || msgpcode.IsFixedArray(c) || msgpcode.IsFixedMap(c) ||
		c == msgpcode.Array16 || c == msgpcode.Array32 || c == msgpcode.Map16 || c == msgpcode.Map32 {
		return false
	}
	return d.Skip() == nil
}
