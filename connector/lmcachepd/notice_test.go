// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/vmihailenco/msgpack/v5"
)

func encode(t testing.TB, v any) []byte {
	t.Helper()
	raw, err := msgpack.Marshal(v)
	assert.NoError(t, err)
	return raw
}

func TestNoticesAreMsgpackMapsWithTheClassesName(t *testing.T) {
	for rule, raw := range map[string][]byte{
		"as msgspec writes it":           []byte("\x82\xa4type\xaaProxyNotif\xa6req_id\xa217"),
		"before the class was renamed":   []byte("\x82\xa4type\xaeNixlProxyNotif\xa6req_id\xa217"),
		"in another order":               []byte("\x82\xa6req_id\xa217\xa4type\xaaProxyNotif"),
		"as a long map, with long texts": []byte("\xde\x00\x02\xd9\x04type\xda\x00\x0aProxyNotif\xa6req_id\xd9\x0217"),
		"with members of a later version": encode(t,
			map[string]any{"type": "ProxyNotif", "req_id": "17", "rank": 3, "ok": true, "error": nil, "at": 1.5,
				"raw": []byte{1}}),
	} {
		id, ok := readNotice(raw)
		assert.True(t, ok, rule)
		assert.Equal(t, "17", id, rule)
	}
	for rule, raw := range map[string][]byte{
		"nothing":                {},
		"nil":                    {0xc0},
		"a number":               {7},
		"a text":                 []byte("\xaaProxyNotif"),
		"a list":                 []byte("\x92\xaaProxyNotif\xa217"),
		"an empty map":           {0x80},
		"another class":          []byte("\x82\xa4type\xacAllocRequest\xa6req_id\xa217"),
		"no type":                []byte("\x81\xa6req_id\xa217"),
		"no id":                  []byte("\x81\xa4type\xaaProxyNotif"),
		"an empty id":            []byte("\x82\xa4type\xaaProxyNotif\xa6req_id\xa0"),
		"an id that is a number": []byte("\x82\xa4type\xaaProxyNotif\xa6req_id\x11"),
		"an id of bytes":         []byte("\x82\xa4type\xaaProxyNotif\xa6req_id\xc4\x0217"),
		"names that are numbers": []byte("\x82\x01\xaaProxyNotif\x02\xa217"),
		"nested": encode(
			t, map[string]any{"type": "ProxyNotif", "req_id": "17", "more": []any{[]any{}}},
		),
		"cut":                       []byte("\x82\xa4type\xaaProxyNotif\xa6req_id\xa21"),
		"two":                       []byte("\x82\xa4type\xaaProxyNotif\xa6req_id\xa217\x80"),
		"a map of 4 billion":        []byte("\xdf\xff\xff\xff\xff\xa4type\xaaProxyNotif\xa6req_id\xa217"),
		"a text of 4 billion bytes": []byte("\x82\xa4type\xaaProxyNotif\xa6req_id\xdb\xff\xff\xff\xff17"),
		"JSON":                      []byte(`{"type":"ProxyNotif","req_id":"17"}`),
	} {
		_, ok := readNotice(raw)
		assert.False(t, ok, rule)
	}
}

// For any bytes readNotice does not panic, and another reader agrees that what it accepts is a notice.
func FuzzNotice(f *testing.F) {
	f.Add([]byte("\x82\xa4type\xaaProxyNotif\xa6req_id\xa217"))
	f.Add([]byte("\xde\x00\x03\xd9\x04type\xda\x00\x0aProxyNotif\xa6req_id\xd9\x0217\xa1x\xc7\x04\x05abcd"))
	f.Add([]byte("\xdf\x00\x00\x00\x02"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		id, ok := readNotice(raw)
		if !ok {
			return
		}
		assert.NotEmpty(t, id)
		assert.True(t, bytes.Contains(raw, []byte(id)) && bytes.Contains(raw, []byte("ProxyNotif")))
	})
}
