// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"bytes"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"

	"github.com/pdkit/pdkit/discovery"
)

// Bounds of a message. vLLM's have up to nine members; sizes of parallelism stay below a hundred.
const (
	maxMembers = 64
	maxDepth   = 8
	maxRanks   = 1 << 16
)

// announcement is a ZeroMQ message of an engine.
type announcement struct {
	hello    bool // a HELLO; all other fields are empty
	endpoint discovery.Endpoint
	zmq      string // zmq_address, or ""
}

// readAnnouncement reads a message. ok is false if it is no known message.
func readAnnouncement(raw []byte) (a announcement, ok bool) {
	m, ok := readMembers(raw)
	if !ok {
		return a, false
	}
	role := m.text["type"]
	switch role {
	case "HELLO":
		return announcement{hello: true}, true
	case "register": // MoRIIO's first releases
		role = m.text["role"]
	}
	switch role {
	case "P":
		a.endpoint.Role = discovery.RolePrefill
	case "D":
		a.endpoint.Role = discovery.RoleDecode
	default:
		return a, false
	}
	host, port, ok := httpAddress(m.text)
	if !ok {
		return a, false
	}
	a.endpoint.URL = &url.URL{Scheme: "http", Host: net.JoinHostPort(host, port)}
	a.endpoint.ID = a.endpoint.URL.Host
	a.endpoint.Attributes = map[string]string{}
	if !a.readPeer(m) || !a.readSizes(m) {
		return a, false
	}
	return a, a.endpoint.Validate() == nil
}

// httpAddress reads http_address, or request_address, which is a URL.
func httpAddress(text map[string]string) (host, port string, ok bool) {
	address := text["http_address"]
	if address == "" {
		address = text["request_address"]
	}
	if scheme, rest, is := strings.Cut(address, "://"); is {
		if scheme != "http" {
			return "", "", false
		}
		address, _, _ = strings.Cut(rest, "/")
	}
	return splitAddress(address)
}

// readPeer reads the address at which other engines reach this one.
func (a *announcement) readPeer(m members) bool {
	handshake, ok1 := m.number("handshake_port", 65535)
	notify, ok2 := m.number("notify_port", 65535)
	if !ok1 || !ok2 {
		return false
	}
	set := func(name, value string) {
		if value != "" {
			a.endpoint.Attributes[name] = value
		}
	}
	if zmq := m.text["zmq_address"]; strings.Contains(zmq, ",") {
		if a.zmq, handshake, notify = parts(zmq); a.zmq == "" {
			return false
		}
	} else if zmq != "" {
		host, port, ok := splitAddress(zmq)
		if !ok {
			return false
		}
		a.zmq = net.JoinHostPort(host, port)
	}
	set("zmqAddress", a.zmq)
	set("handshakePort", handshake)
	set("notifyPort", notify)
	return true
}

// parts reads MoRIIO's zmq_address as its engines do: the parts come in any order, unknown ones are ignored, and each
// is cut at its first colon.
func parts(zmq string) (address, handshake, notify string) {
	host := ""
	for part := range strings.SplitSeq(zmq, ",") {
		name, value, _ := strings.Cut(part, ":")
		switch value = strings.TrimSpace(value); strings.TrimSpace(name) {
		case "host":
			if host = strings.TrimSuffix(strings.TrimPrefix(value, "["), "]"); !isHost(host) {
				return "", "", ""
			}
		case "handshake":
			handshake = number(value, 65535)
		case "notify":
			notify = number(value, 65535)
		}
	}
	if host == "" || handshake == "" || notify == "" {
		return "", "", ""
	}
	return "host:" + host + ",handshake:" + handshake + ",notify:" + notify, handshake, notify
}

func (a *announcement) readSizes(m members) bool {
	for member, attribute := range map[string]string{"tp_size": "tpSize", "dp_size": "dpSize"} {
		n, ok := m.number(member, maxRanks)
		if !ok {
			return false
		}
		if n != "" {
			a.endpoint.Attributes[attribute] = n
		}
	}
	switch mode := strings.ToLower(m.text["transfer_mode"]); mode {
	case "":
	case "read", "write":
		a.endpoint.Attributes["mode"] = mode
	default:
		return false
	}
	return true
}

// splitAddress separates host and port. Engines join them by a colon; an IPv6 address may have brackets or not.
func splitAddress(address string) (host, port string, ok bool) {
	colon := strings.LastIndexByte(address, ':')
	if colon < 0 {
		return "", "", false
	}
	host, port = address[:colon], number(address[colon+1:], 65535)
	if inner, bracket := strings.CutPrefix(host, "["); bracket {
		if host, ok = strings.CutSuffix(inner, "]"); !ok || !strings.Contains(host, ":") {
			return "", "", false
		}
	}
	return host, port, port != "" && isHost(host)
}

// isHost reports whether host is a name or an address to which others can connect.
func isHost(host string) bool {
	if ip, err := netip.ParseAddr(host); err == nil {
		return !ip.IsUnspecified() && !ip.IsMulticast() && ip.Zone() == ""
	}
	return host != "" && len(host) <= 253 && !strings.ContainsFunc(host, func(r rune) bool {
		return r != '.' && r != '-' && r != '_' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	}) && !strings.Contains(host, "___") // "___" is a mark in the ids of requests
}

// number returns a whole number from 1 to most in its usual spelling, or "".
func number(text string, most uint64) string {
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32)
	if err != nil || n < 1 || n > most {
		return ""
	}
	return strconv.FormatUint(n, 10)
}

// members are the known members of a message, numbers as text.
type members struct{ text map[string]string }

// number returns a member that is a number, "" if it is missing. ok is false if it is no number from 1 to most.
func (m members) number(name string, most uint64) (text string, ok bool) {
	if m.text[name] == "" {
		return "", true
	}
	text = number(m.text[name], most)
	return text, text != ""
}

// isNumber has the known members; true for those that engines send as numbers, or in some releases as text.
var isNumber = map[string]bool{
	"type": false, "role": false, "http_address": false, "request_address": false, "zmq_address": false,
	"transfer_mode":  false,
	"handshake_port": true, "notify_port": true, "tp_size": true, "dp_size": true,
}

// readMembers reads a map. It ignores unknown members whatever they hold; if a member comes twice, the last one counts.
func readMembers(raw []byte) (m members, ok bool) {
	rest := bytes.NewReader(raw)
	d := msgpack.NewDecoder(rest)
	if c, err := d.PeekCode(); err != nil || !isMap(c) {
		return m, false
	}
	n, err := d.DecodeMapLen()
	if err != nil || n < 1 || n > maxMembers {
		return m, false
	}
	m.text = make(map[string]string, 8)
	for range n {
		name, ok := readText(d, rest)
		if !ok {
			return m, false
		}
		numeric, known := isNumber[name]
		if !known {
			if !skip(d, rest, maxDepth) {
				return m, false
			}
			continue
		}
		if m.text[name], ok = readValue(d, rest, numeric); !ok {
			return m, false
		}
	}
	return m, rest.Len() == 0
}

// readValue reads text, nil as "", and, if numeric is true, a number as text.
func readValue(d *msgpack.Decoder, rest *bytes.Reader, numeric bool) (string, bool) {
	c, err := d.PeekCode()
	switch {
	case err != nil:
		return "", false
	case c == msgpcode.Nil:
		return "", d.DecodeNil() == nil
	case numeric && (msgpcode.IsFixedNum(c) || c >= msgpcode.Uint8 && c <= msgpcode.Int64):
		n, err := d.DecodeInt64()
		return strconv.FormatInt(n, 10), err == nil
	}
	return readText(d, rest)
}

// readText reads text, or bytes, which older encoders send. It checks the length before it allocates memory.
func readText(d *msgpack.Decoder, rest *bytes.Reader) (string, bool) {
	c, err := d.PeekCode()
	if err != nil || !msgpcode.IsString(c) && !msgpcode.IsBin(c) {
		return "", false
	}
	n, err := d.DecodeBytesLen()
	if err != nil || n < 0 || n > rest.Len() {
		return "", false
	}
	text := make([]byte, n)
	err = d.ReadFull(text)
	return string(text), err == nil
}

func isMap(c byte) bool {
	return msgpcode.IsFixedMap(c) || c == msgpcode.Map16 || c == msgpcode.Map32
}

// skip skips a value of any type. Containers may be nested to a depth.
func skip(d *msgpack.Decoder, rest *bytes.Reader, depth int) bool {
	c, err := d.PeekCode()
	if err != nil {
		return false
	}
	var n int
	switch {
	case msgpcode.IsFixedArray(c), c == msgpcode.Array16, c == msgpcode.Array32:
		n, err = d.DecodeArrayLen()
	case isMap(c):
		n, err = d.DecodeMapLen()
		n *= 2
	case msgpcode.IsString(c), msgpcode.IsBin(c):
		_, ok := readText(d, rest)
		return ok
	// they do not fit a frame, and the decoder would allocate memory first
	case c == msgpcode.Ext16, c == msgpcode.Ext32:
		return false
	default:
		return d.Skip() == nil
	}
	if err != nil || depth == 0 || n > rest.Len() {
		return false
	}
	for range n {
		if !skip(d, rest, depth-1) {
			return false
		}
	}
	return true
}
