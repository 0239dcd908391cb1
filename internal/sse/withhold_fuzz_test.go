// SPDX-License-Identifier: Apache-2.0

package sse

import (
	"bytes"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

// pieces gives in, cut wherever cuts says.
type pieces struct {
	in   []byte
	cuts []byte // the sizes of the pieces, over and over
	n    int
}

// Read implements io.Reader.
func (p *pieces) Read(b []byte) (int, error) {
	if len(p.in) == 0 {
		return 0, io.EOF
	}
	size := len(p.in)
	if len(p.cuts) > 0 {
		size = 1 + int(p.cuts[p.n%len(p.cuts)])
		p.n++
	}
	n := copy(b, p.in[:min(size, len(p.in))])
	p.in = p.in[n:]
	return n, nil
}

// Whatever is skipped unread, and wherever reads cut, the result is that of reading each byte.
func FuzzWithheld(f *testing.F) {
	for _, seed := range []string{
		"data: {\"a\":1,\"kv_v\":{\"h\":\"x\"},\"b\":[2]}\n\ndata: [DONE]\n\n",
		"event: kv_v\"\ndata: {\"kv_v\":\"t\\\"\",\r\ndata: \"c\":{\"kv_v\":{}}}\r\n\r\n: kv_v\":{\n\n",
		"data:{\"kv_v\": null}\n\ndata: {\"kv_v\":\n data: {\"a\":1}}\n\n",
		"{\"kv_v\":{\"a\":[{}]}}", "data: v\n\nkv_v\"",
	} {
		f.Add([]byte(seed), []byte{3, 0, 11}, true)
		f.Add([]byte(seed), []byte{}, false)
	}
	m := MemberAt("kv_v")
	f.Fuzz(func(t *testing.T, in, cuts []byte, events bool) {
		var slow, w Withheld
		slow.Withhold(nil, m, m.Depth, events, -1)
		var want []byte
		for _, c := range in {
			if slow.next(c) {
				want = append(want, c)
			}
		}
		w.Withhold(&pieces{in: bytes.Clone(in), cuts: cuts}, m, m.Depth, events, -1)
		got, err := io.ReadAll(&w)
		require.NoError(t, err)
		require.Equal(t, string(want), string(got))
	})
}
