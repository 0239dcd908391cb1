// SPDX-License-Identifier: Apache-2.0

package sse_test

import (
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/internal/sse"
)

func TestFaultsOfAStream(t *testing.T) {
	const token = `data: {"choices":[{"delta":{"content":"say \"error\": data: {\"error\":1}"}}]}` + "\n\n"
	const logged = `data: {"choices":[{"logprobs":{"tokens":["error"]}}]}` + "\n\n"
	const done = "data: [DONE]\n\n"
	text := strings.Repeat("x", 3000)
	long := `data: {"choices":[{"text":"` + text + `"}]}` + "\n\n"
	for name, c := range map[string]struct{ in, want string }{
		"none":                 {token + token + done, token + token + done},
		"not an object":        {`data: [{"error":{}}]` + "\n\n" + done, `data: [{"error":{}}]` + "\n\n" + done},
		"a word":               {token + logged + done, token + logged + done},
		"after a token":        {token + `data: {"error": {"m":"at h"}}` + "\n\n" + done, token + "data: X\n\n" + done},
		"at once":              {`data: {"error":{}}` + "\n\n" + token, "data: X\n\n" + token},
		"of other spaces":      {token + `data: { "error" :{ }}` + "\n\n" + done, token + "data: X\n\n" + done},
		"without a space":      {token + `data:{"error":{}}` + "\n\n" + done, token + "data: X\n\n" + done},
		"not the first member": {token + `data: {"id":1,"error":{}}` + "\n\n" + done, token + "data: X\n\n" + done},
		"in several lines": {token + "data: {\ndata:   \"error\": {}\ndata: }\n\n" + done,
			token + "data: X\n\n" + done},
		"by its name": {token + "event: error\ndata: at h\n\n" + done, token + "event: error\ndata: X\n\n" + done},
		"by its name, without a space": {token + "id: 7\nevent:error\ndata: {}\n\n",
			token + "id: 7\nevent:error\ndata: X\n\n"},
		"carriage returns": {`data: {}` + "\r\n\r\n" + `data: {"error":{}}` + "\r\n\r\n" + "data: {}\r\n\r\n",
			"data: {}\r\n\r\ndata: X\n\ndata: {}\r\n\r\n"},
		"several": {strings.Repeat(`data: {"error":{}}`+"\n\n"+token, 2),
			strings.Repeat("data: X\n\n"+token, 2)},
		"without its end":   {token + `data: {"error":{}}`, token + "data: X\n\n"},
		"begun and not one": {token + `data: {"er`, token + `data: {"er`},
		"behind a long one": {long + `data: {"error":{}}` + "\n\n", long + "data: X\n\n"},
		"long itself": {token + `data: {"error":{"a":"` + text + `"}}` + "\n\n" + token,
			token + "data: X\n\n" + token},
	} {
		fn := func(event, data []byte) ([]byte, error) {
			if gjson.GetBytes(data, "error").IsObject() || sse.Named(event, "error") {
				return []byte("X"), nil
			}
			return data, nil
		}
		read := func(rule string, src io.Reader, wrap func(io.Reader) io.Reader) {
			var f sse.Faults
			f.Watch(src, nil, fn)
			got, err := io.ReadAll(wrap(&f))
			require.NoError(t, err)
			assert.Equal(t, c.want, string(got), "%s, %s", name, rule)
		}
		as := func(r io.Reader) io.Reader { return r }
		for cut := range len(c.in) {
			read("cut", io.MultiReader(strings.NewReader(c.in[:cut]), strings.NewReader(c.in[cut:])), as)
		}
		read("bytes", iotest.OneByteReader(strings.NewReader(c.in)), as)
		read("with its end", iotest.DataErrReader(strings.NewReader(c.in)), as)
		read("into little", strings.NewReader(c.in), iotest.OneByteReader)
		read("bytes into little", iotest.OneByteReader(strings.NewReader(c.in)), iotest.HalfReader)
	}
}

// A stream that breaks in what may begin an error ends with that, and with what broke it.
func TestFaultsPassABreakOn(t *testing.T) {
	for _, in := range []string{"data: {}\n\ndata: {\"e", "data: {}\n\ndata: {\"error\":1}\n\n", "data: {\"error\":1"} {
		var f sse.Faults
		f.Watch(io.MultiReader(strings.NewReader(in), iotest.ErrReader(io.ErrUnexpectedEOF)), nil,
			func(_, data []byte) ([]byte, error) { return data, nil })
		got, err := io.ReadAll(&f)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		assert.True(t, strings.HasPrefix(in, string(got)), string(got))
	}
}

// Nothing is held back that can be no error: a token is passed on as it comes.
func TestFaultsHoldNoTokenBack(t *testing.T) {
	var f sse.Faults
	r, w := io.Pipe()
	f.Watch(r, nil, func(_, data []byte) ([]byte, error) { return data, nil })
	go func() { _, _ = w.Write([]byte("data: {\"choices\":[]}\n\n")) }()
	p := make([]byte, 100)
	n, err := f.Read(p)
	require.NoError(t, err)
	assert.Equal(t, "data: {\"choices\":[]}\n\n", string(p[:n]))
}

// BenchmarkFaults is a stream without an error: chunks that come one by one, and many in one read.
func BenchmarkFaults(b *testing.B) {
	const event = tokenEvent + "}\n\n"
	for _, c := range []struct{ name, piece string }{{"paced", event}, {"coalesced", strings.Repeat(event, 100)}} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.piece)))
			p := make([]byte, max(4096, len(c.piece)))
			var f sse.Faults
			f.Watch(&endless{[]byte(c.piece), b.N}, nil, nil)
			for {
				if _, err := f.Read(p); err != nil {
					return
				}
			}
		})
	}
}
