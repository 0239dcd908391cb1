// SPDX-License-Identifier: Apache-2.0

package sse_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/sse"
)

// withheld reads a response whose member is withheld, in all the ways in which reads may cut it.
func withheld(t *testing.T, in, want, path string, events, blank bool) {
	t.Helper()
	m := sse.MemberAt(path)
	length := int64(-1)
	if blank {
		length = int64(len(in))
	}
	for name, src := range map[string]io.Reader{
		"in one read":  strings.NewReader(in),
		"byte by byte": iotest.OneByteReader(strings.NewReader(in)),
		"with its end": iotest.DataErrReader(strings.NewReader(in)),
		"half by half": iotest.HalfReader(strings.NewReader(in)),
	} {
		var w sse.Withheld
		w.Withhold(src, m, m.Depth, events, length)
		got, err := io.ReadAll(&w)
		require.NoError(t, err)
		assert.Equal(t, want, string(got), name)
	}
	for cut := range len(in) {
		var w sse.Withheld
		w.Withhold(io.MultiReader(strings.NewReader(in[:cut]), strings.NewReader(in[cut:])), m, m.Depth, events, length)
		got, err := io.ReadAll(&w)
		require.NoError(t, err)
		require.Equal(t, want, string(got), "cut at %d", cut)
	}
}

func TestAStreamsMemberIsEmptied(t *testing.T) {
	const token = `data: {"choices":[{"delta":{"content":"a"}}],"p":null}`
	for rule, c := range map[string]struct{ in, want string }{
		"the last chunk": {token + "\n\n" + `data: {"choices":[],"p":{"host":"10.0.0.2","ids":[[7,8]],"t":"}\"]"},` +
			`"u":1}` + "\n\ndata: [DONE]\n\n",
			token + "\n\n" + `data: {"choices":[],"p":{},"u":1}` + "\n\ndata: [DONE]\n\n"},
		"carriage returns": {"data: {\"p\": {\"a\":1}}\r\n\r\ndata: x\r\n\r\n",
			"data: {\"p\": {}}\r\n\r\ndata: x\r\n\r\n"},
		"the only event":    {`data:{"p":{"a":1}}`, `data:{"p":{}}`},
		"a byte order mark": {"\ufeffdata: {\"p\":[1,2]}\n\n", "\ufeffdata: {\"p\":[]}\n\n"},
		"a text":            {`data: {"p":"ticket \"7\"","q":"p"}` + "\n\n", `data: {"p":"","q":"p"}` + "\n\n"},
		"several lines": {"event: {\": e\ndata: {\"p\":\ndata: {\"a\": 1,\ndata: \"b\":2},\nid: 7\ndata: \"c\":3}\n\n",
			"event: {\": e\ndata: {\"p\":\ndata: {},\nid: 7\ndata: \"c\":3}\n\n"},
		"twice": {`data: {"p":{"a":1}}` + "\n\n" + `data: {"p":{"b":1}}` + "\n\n",
			`data: {"p":{}}` + "\n\n" + `data: {"p":{}}` + "\n\n"},
		"after an event that is not whole": {"data: {\"a\": [{\n\ndata: {\"p\":{\"b\":1}}\n\n",
			"data: {\"a\": [{\n\ndata: {\"p\":{}}\n\n"},
	} {
		t.Run(rule, func(t *testing.T) { withheld(t, c.in, c.want, "p", true, false) })
	}
}

// A search for the name's rarest letter, the v, must find each whole name and no half one.
func TestALongNameIsFound(t *testing.T) {
	const name = "kv_transfer_params"
	for _, before := range []string{"", "v", "vv_kv", "kv_transfer_param", "kkv_transfer_params", `kv\"`, " v kv v"} {
		in := `v":1` + "\n\n" + `data: {"t":"` + before + `","kv_transfer_params":{"a":1},"v":2}` + "\n\n"
		withheld(t, in, strings.Replace(in, `{"a":1}`, "{}", 1), name, true, false)
		withheld(t, in[6+len("data: "):], strings.Replace(in[6+len("data: "):], `{"a":1}`, "{}", 1), name, false, false)
	}
}

// What only looks like the member passes, byte for byte.
func TestTheNameElsewherePasses(t *testing.T) {
	for rule, data := range map[string]string{
		"null":                  `{"choices":[],"p":null}`,
		"null, spaced":          `{"choices":[], "p" : null }`,
		"a number":              `{"p":7,"q":true}`,
		"in a text":             `{"content":"the \"p\": {\"a\":1} of p"}`,
		"as a text":             `{"content":"p","role":["p","p"]}`,
		"at a text's end":       `{"content":"\\p","x":"xp","p2":{"a":1},"y\\p":{"a":1}}`,
		"deeper":                `{"message":{"p":{"a":1}},"list":[{"p":{"a":1}}]}`,
		"in another's name":     `{"pp":{"a":1},"px":{"a":1},"\"p":{"a":1}}`,
		"no JSON":               `p":{"a":1}`,
		"closed more than open": `}}]{"q":{"p":{}}}`,
	} {
		t.Run(rule, func(t *testing.T) {
			withheld(t, "data: "+data+"\n\n", "data: "+data+"\n\n", "p", true, false)
			withheld(t, ": p\":{\"a\":1}\nevent: p\ndata: "+data+"\r\n\r\n", ": p\":{\"a\":1}\nevent: p\ndata: "+data+
				"\r\n\r\n", "p", true, false)
			withheld(t, data, data, "p", false, true)
		})
	}
}

func TestAWholeResponsesMemberIsEmptied(t *testing.T) {
	const in = "{\"choices\": [],\n \"p\": {\"a\": [1, {}],\n \"b\": \"x\"}, \"q\": {\"p\": {\"a\": 1}}}"
	withheld(t, in, "{\"choices\": [],\n \"p\": {}, \"q\": {\"p\": {\"a\": 1}}}", "p", false, false)
	withheld(t, in, "{\"choices\": [],\n \"p\": {"+strings.Repeat(" ", 23)+"}, \"q\": {\"p\": {\"a\": 1}}}", "p", false,
		true)
	withheld(t, `{"choices":[{"p":{"a":1},"m":{"p":{}}},{"p":{"b":1}}],"p":{"c":1}}`,
		`{"choices":[{"p":{},"m":{"p":{}}},{"p":{}}],"p":{"c":1}}`, "choices.0.p", false, false)
}

// endless gives the same events for ever.
type endless struct {
	events []byte
	left   int
}

func (e *endless) Read(p []byte) (int, error) {
	if e.left == 0 {
		return 0, io.EOF
	}
	e.left--
	return copy(p, e.events), nil
}

const tokenEvent = `data: {"id":"chatcmpl-6b4d9b0c","object":"chat.completion.chunk","created":1,"model":"m",` +
	`"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]`

// BenchmarkWithheld is a stream whose member is withheld: chunks that come one by one and many in one read, without the
// member's name, with its null in each (vLLM 0.33.0), and cut anywhere; and a whole response.
func BenchmarkWithheld(b *testing.B) {
	const with = tokenEvent + `,"kv_transfer_params":null}` + "\n\n"
	const without = tokenEvent + "}\n\n"
	m := sse.MemberAt("kv_transfer_params")
	for _, c := range []struct {
		name, piece string
		events      bool
		length      int64
	}{
		{"paced", without, true, -1}, {"coalesced", strings.Repeat(without, 100), true, -1},
		{"paced-null", with, true, -1}, {"coalesced-null", strings.Repeat(with, 100), true, -1},
		{"cut", strings.Repeat(without, 100)[:4096], true, -1},
		{"whole-2KB", strings.Repeat(without, 11)[6:2054], false, -1},
		{"escapes-2KB", strings.Repeat(`\n`, 1024), false, -1},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.piece)))
			b.ReportAllocs()
			p := make([]byte, len(c.piece))
			var w sse.Withheld
			w.Withhold(&endless{[]byte(c.piece), b.N}, m, m.Depth, c.events, c.length)
			for {
				if _, err := w.Read(p); err != nil {
					return
				}
			}
		})
	}
}

func TestAStreamIsPassedOnWithoutACopy(t *testing.T) {
	m := sse.MemberAt("kv_transfer_params")
	p := make([]byte, 64<<10)
	var w sse.Withheld
	src := &endless{[]byte(strings.Repeat(tokenEvent+"}\n\n", 100)), 1 << 20}
	w.Withhold(src, m, m.Depth, true, -1)
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = w.Read(p) }))
}

// A member that is not null is found, however the reads cut the response, and nothing else is.
func TestForbid(t *testing.T) {
	found := errors.New("found")
	for body, want := range map[string]error{
		`{"choices":[{"text":"a","routed_experts":null}],"x":1}`:                 nil,
		`{"choices":[{"text":"a","routed_experts" : null}],"x":1}`:               nil,
		`{"choices":[{"text":"\"routed_experts\":\"x\"","b":"routed_experts"}]}`: nil,
		`{"choices":[{"text":"a","routed_experts":"k05VTVBZ"}],"x":1}`:           found,
		`{"choices":[{"routed_experts" :` + "\n" + ` "k05VTVBZ"}]}`:              found,
	} {
		for size := 1; size <= len(body); size++ {
			var f sse.Forbid
			f.Forbid(&chunks{body, size}, sse.MemberAt("routed_experts"), found)
			got, err := io.ReadAll(&f)
			require.Equal(t, want, err, "%s in pieces of %d", body, size)
			if want == nil {
				require.Equal(t, body, string(got))
			} else {
				require.NotContains(t, string(got), "k05")
			}
		}
	}
}

// chunks is a text in reads of one size.
type chunks struct {
	rest string
	size int
}

func (c *chunks) Read(p []byte) (int, error) {
	if c.rest == "" {
		return 0, io.EOF
	}
	n := copy(p, c.rest[:min(c.size, len(c.rest))])
	c.rest = c.rest[n:]
	return n, nil
}
