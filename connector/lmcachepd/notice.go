// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"bytes"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// maxMembers bounds the members of a notice's map. LMCache's has two.
const maxMembers = 16

// readNotice reads a notice and returns its request id. LMCache encodes a msgspec.Struct with tag=True: a msgpack map whose member type is
// the class's name, ProxyNotif, or NixlProxyNotif before it was renamed. Members that come with later versions are skipped. ok is false of
// everything else.
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

// readString reads text, and only text: the decoder would also take bytes for it.
func readString(d *msgpack.Decoder) (string, bool) {
	c, err := d.PeekCode()
	if err != nil || !msgpcode.IsString(c) {
		return "", false
	}
	s, err := d.DecodeString()
	return s, err == nil
}

// skip passes over a value that is not a container: none of LMCache's is, and nested ones cost stack.
func skip(d *msgpack.Decoder) bool {
	c, err := d.PeekCode()
	if err != nil || msgpcode.IsFixedArray(c) || msgpcode.IsFixedMap(c) ||
		c == msgpcode.Array16 || c == msgpcode.Array32 || c == msgpcode.Map16 || c == msgpcode.Map32 {
		return false
	}
	return d.Skip() == nil
}
