// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/pdkit/pdkit/discovery"
)

type obj = map[string]any

func encoded(t testing.TB, v any) []byte {
	t.Helper()
	raw, err := msgpack.Marshal(v)
	require.NoError(t, err)
	return raw
}

func with(base obj, changes obj) obj {
	o := maps.Clone(base)
	for k, v := range changes {
		if o[k] = v; v == "absent" {
			delete(o, k)
		}
	}
	return o
}

// The messages as the engines' sources have them; see the package's documentation for where.
var (
	ofP2pNccl = obj{"type": "P", "http_address": "10.0.1.2:20001", "zmq_address": "10.0.1.2:21001"}
	ofMoRIIO  = obj{
		"type": "D", "http_address": "10.0.0.6:8200", "zmq_address": "host:10.0.0.6,handshake:6301,notify:61005",
		"dp_size": 2, "tp_size": 8, "transfer_mode": "READ",
	}
	ofOldMoRIIO = obj{
		"type": "register", "role": "D", "index": "1", "request_address": "http://10.0.0.6:8200/v1/completions",
		"handshake_port": 6301, "notify_port": 61005, "dp_size": 2, "tp_size": 8, "transfer_mode": "WRITE",
	}
)

func TestWhatEnginesSayOfThemselves(t *testing.T) {
	for rule, k := range map[string]struct {
		message    obj
		url        string
		role       discovery.Role
		attributes map[string]string
	}{
		"P2pNccl": {ofP2pNccl, "http://10.0.1.2:20001", discovery.RolePrefill,
			map[string]string{"zmqAddress": "10.0.1.2:21001"}},
		"P2pNccl over IPv6 without brackets": {
			with(ofP2pNccl, obj{"http_address": "fd00::2:20001", "zmq_address": "fd00::2:21001"}),
			"http://[fd00::2]:20001", discovery.RolePrefill, map[string]string{"zmqAddress": "[fd00::2]:21001"},
		},
		"P2pNccl over IPv6 with brackets": {
			with(ofP2pNccl, obj{"http_address": "[fd00::2]:20001", "zmq_address": "[fd00::2]:21001"}),
			"http://[fd00::2]:20001", discovery.RolePrefill, map[string]string{"zmqAddress": "[fd00::2]:21001"},
		},
		"P2pNccl by names": {
			with(ofP2pNccl, obj{"http_address": "p-0.p.svc:20001", "zmq_address": "p-0.p.svc:21001"}),
			"http://p-0.p.svc:20001", discovery.RolePrefill, map[string]string{"zmqAddress": "p-0.p.svc:21001"},
		},
		"MoRIIO": {ofMoRIIO, "http://10.0.0.6:8200", discovery.RoleDecode, map[string]string{
			"zmqAddress": "host:10.0.0.6,handshake:6301,notify:61005", "handshakePort": "6301", "notifyPort": "61005",
			"tpSize": "8", "dpSize": "2", "mode": "read",
		}},
		"MoRIIO over IPv6": {
			with(
				ofMoRIIO, obj{"http_address": "fd00::6:8200",
					"zmq_address": "host:fd00::6,handshake:6301,notify:61005"},
			),
			"http://[fd00::6]:8200", discovery.RoleDecode, map[string]string{
				"zmqAddress": "host:fd00::6,handshake:6301,notify:61005", "handshakePort": "6301",
				"notifyPort": "61005", "tpSize": "8", "dpSize": "2", "mode": "read",
			},
		},
		"MoRIIO's first releases": {ofOldMoRIIO, "http://10.0.0.6:8200", discovery.RoleDecode, map[string]string{
			"handshakePort": "6301", "notifyPort": "61005", "tpSize": "8", "dpSize": "2", "mode": "write",
		}},
		"numbers as text, sizes as nil, members of later versions": {
			with(ofOldMoRIIO, obj{
				"handshake_port": "6301", "dp_size": nil, "node_hosts": []any{"a", obj{"b": []int{1, 2}}}, "load": 0.5,
				"more": []byte{1}, "big": uint64(1) << 63,
			}),
			"http://10.0.0.6:8200", discovery.RoleDecode,
			map[string]string{"handshakePort": "6301", "notifyPort": "61005", "tpSize": "8", "mode": "write"},
		},
		"text as bytes, as older encoders have it": {
			obj{"type": []byte("P"), "http_address": []byte("10.0.1.2:20001"), "zmq_address": []byte("10.0.1.2:21001")},
			"http://10.0.1.2:20001", discovery.RolePrefill, map[string]string{"zmqAddress": "10.0.1.2:21001"},
		},
	} {
		t.Run(rule, func(t *testing.T) {
			a, ok := readAnnouncement(encoded(t, k.message))
			require.True(t, ok)
			assert.False(t, a.hello)
			assert.Equal(t, k.url, a.endpoint.URL.String())
			assert.Equal(t, strings.TrimPrefix(k.url, "http://"), a.endpoint.ID)
			assert.Equal(t, k.role, a.endpoint.Role)
			assert.Equal(t, k.attributes, a.endpoint.Attributes)
		})
	}
}

func TestHello(t *testing.T) {
	a, ok := readAnnouncement(encoded(t, obj{"type": "HELLO"}))
	assert.True(t, ok)
	assert.True(t, a.hello)
}

func TestWhatIsNoAnnouncement(t *testing.T) {
	deep := any(1)
	for range maxDepth + 2 {
		deep = []any{deep}
	}
	many := obj{}
	for i := range maxMembers + 1 {
		many[strings.Repeat("x", i+1)] = 1
	}
	for rule, v := range map[string]any{
		"a list": []any{"P"}, "text": "P", "nil": nil, "a number": 7, "an empty map": obj{},
		"keys that are no text":             map[int]string{1: "P"},
		"no type":                           with(ofP2pNccl, obj{"type": "absent"}),
		"another type":                      with(ofP2pNccl, obj{"type": "X"}),
		"a type that is no text":            with(ofP2pNccl, obj{"type": 1}),
		"a role without register":           obj{"role": "P", "http_address": "10.0.1.2:20001"},
		"no address":                        with(ofP2pNccl, obj{"http_address": "absent"}),
		"no port":                           with(ofP2pNccl, obj{"http_address": "10.0.1.2"}),
		"port 0":                            with(ofP2pNccl, obj{"http_address": "10.0.1.2:0"}),
		"a port too large":                  with(ofP2pNccl, obj{"http_address": "10.0.1.2:65536"}),
		"no host":                           with(ofP2pNccl, obj{"http_address": ":20001"}),
		"every address":                     with(ofP2pNccl, obj{"http_address": "0.0.0.0:20001"}),
		"user info":                         with(ofP2pNccl, obj{"http_address": "user@10.0.1.2:20001"}),
		"another scheme":                    with(ofP2pNccl, obj{"http_address": "file://10.0.1.2:20001"}),
		"brackets around a name":            with(ofP2pNccl, obj{"http_address": "[p]:20001"}),
		"half a bracket":                    with(ofP2pNccl, obj{"http_address": "[fd00::2:20001"}),
		"line breaks":                       with(ofP2pNccl, obj{"http_address": "10.0.1.2\r\nX: y:20001"}),
		"a mark of request ids":             with(ofP2pNccl, obj{"zmq_address": "a___decode_addr_b:1"}),
		"a zmq_address of another form":     with(ofP2pNccl, obj{"zmq_address": "tcp://10.0.1.2:21001"}),
		"MoRIIO's without a port":           with(ofMoRIIO, obj{"zmq_address": "host:10.0.0.6,handshake:6301"}),
		"MoRIIO's without a host":           with(ofMoRIIO, obj{"zmq_address": "handshake:6301,notify:61005"}),
		"MoRIIO's with a host that is none": with(ofMoRIIO, obj{"zmq_address": "host:a/b,handshake:6301,notify:61005"}),
		"a port that is no number":          with(ofOldMoRIIO, obj{"handshake_port": "x"}),
		"a port that is a fraction":         with(ofOldMoRIIO, obj{"handshake_port": 6301.5}),
		"a port that is a list":             with(ofOldMoRIIO, obj{"notify_port": []int{1}}),
		"a negative size":                   with(ofMoRIIO, obj{"tp_size": -1}),
		"a size beyond all":                 with(ofMoRIIO, obj{"dp_size": uint64(1) << 63}),
		"another mode":                      with(ofMoRIIO, obj{"transfer_mode": "COPY"}),
		"nested too deep":                   with(ofP2pNccl, obj{"more": deep}),
		"too many members":                  with(ofP2pNccl, many),
	} {
		_, ok := readAnnouncement(encoded(t, v))
		assert.False(t, ok, rule)
	}
	good := encoded(t, ofP2pNccl)
	for i := range good {
		_, ok := readAnnouncement(good[:i])
		assert.False(t, ok, "the first %d bytes alone", i)
	}
	_, ok := readAnnouncement(append(good, 0xc0))
	assert.False(t, ok, "something after it")
	for rule, raw := range map[string]string{
		"a map of 4 G members": "\xdf\xff\xff\xff\xff", "text of 4 GB": "\x81\xdb\xff\xff\xff\xff",
		"bytes of 4 GB": "\x81\xa1x\xc6\xff\xff\xff\xff",
		"a list of 4 G": "\x81\xa1x\xdd\xff\xff\xff\xff", "an extension of 4 GB": "\x81\xa1x\xc9\xff\xff\xff\xff\x01",
		"HTTP": "GET / HTTP/1.1",
	} {
		_, ok := readAnnouncement([]byte(raw))
		assert.False(t, ok, rule)
	}
}

// For any bytes the reader does not panic, takes no more memory than the message has, and what it accepts can be
// published.
func FuzzAnnouncement(f *testing.F) {
	for _, o := range []obj{ofP2pNccl, ofMoRIIO, ofOldMoRIIO, {"type": "HELLO"},
		with(ofMoRIIO, obj{"more": []any{obj{"a": nil}}})} {
		f.Add(encoded(f, o))
	}
	f.Add([]byte("\xdf\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		a, ok := readAnnouncement(raw)
		if !ok || a.hello {
			return
		}
		assert.NoError(t, a.endpoint.Validate())
		again, err := discovery.New(a.endpoint.URL.String(), a.endpoint.Role)
		assert.NoError(t, err, "it is a URL when written down")
		assert.Equal(t, a.endpoint.ID, again.ID)
		for name, value := range a.endpoint.Attributes {
			assert.Contains(t, []string{"zmqAddress", "handshakePort", "notifyPort", "tpSize", "dpSize", "mode"}, name)
			assert.NotContains(t, value, "___")
			assert.NotContains(t, value, "\n")
		}
	})
}

// For any body the API does not panic, and what it accepts can be published.
func FuzzBody(f *testing.F) {
	f.Add(
		[]byte(`{"id":"a","url":"http://10.0.0.1:8000","role":"prefill","attributes":{"bootstrapPort":"8998"},` +
			`"leaseSeconds":15}`),
	)
	f.Add([]byte(`{"url":"https://[fd00::1]:8000/base/","role":"both"}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		e, lease, bad := readRegistration(raw, DefaultLease)
		if bad != nil {
			assert.NotEmpty(t, bad.Error())
			return
		}
		assert.NoError(t, e.Validate())
		assert.GreaterOrEqual(t, lease, minLease)
		assert.LessOrEqual(t, lease, maxLease)
	})
}
