// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func set(name, value string) Edit { return Edit{Name: name, Value: []byte(value)} }
func del(name string) Edit        { return Edit{Name: name, Delete: true} }

func spliced(t *testing.T, body string, edits ...Edit) string {
	t.Helper()
	d, err := Parse([]byte(body))
	require.NoError(t, err)
	var s Segments
	d.Splice(edits, &s)
	out := s.AppendTo(nil)
	assert.Equal(t, int64(len(out)), s.Len())
	return string(out)
}

func TestSplice(t *testing.T) {
	long := `"` + strings.Repeat("x", 2*copyUpTo) + `"`
	for _, c := range []struct {
		rule, body string
		edits      []Edit
		want       string
	}{
		{"no edit changes no byte", " { \"a\" :1 ,\n\"a\\u0062\": 1.10 } ", nil,
			" { \"a\" :1 ,\n\"a\\u0062\": 1.10 } "},
		{"a member is set where it stands", `{"a":1,"b":2,"c":3}`, []Edit{set("b", "9")}, `{"a":1,"b":9,"c":3}`},
		{"white space around it stays", `{ "a" : 1 , "b" : 2 }`, []Edit{set("a", "9")}, `{ "a" : 9 , "b" : 2 }`},
		{"a name keeps its spelling", `{"str\u0065am":true}`, []Edit{set("stream", "false")}, `{"str\u0065am":false}`},
		{"a new member goes to the end", `{"a":1}`, []Edit{set("b", "2")}, `{"a":1,"b":2}`},
		{"new members follow the order of the edits", `{"a":1}`, []Edit{set("c", "3"), set("b", "2")},
			`{"a":1,"c":3,"b":2}`},
		{"into an empty object no comma", `{}`, []Edit{set("b", "2"), set("c", "3")}, `{"b":2,"c":3}`},
		{"into an empty object with white space", " { } ", []Edit{set("b", "2")}, ` {"b":2 } `},
		{"the first is deleted with its comma", `{"a":1,"b":2,"c":3}`, []Edit{del("a")}, `{"b":2,"c":3}`},
		{"one in the middle is deleted with its comma", `{"a":1,"b":2,"c":3}`, []Edit{del("b")}, `{"a":1,"c":3}`},
		{"the comma before the deleted one stays", `{"a":1 , "b":2,"c":3}`, []Edit{del("b")}, `{"a":1 , "c":3}`},
		{"the last is deleted with the comma before it", `{"a":1,"b":2,"c":3}`, []Edit{del("c")}, `{"a":1,"b":2}`},
		{"neighbours are deleted", `{"a":1,"b":2,"c":3,"d":4}`, []Edit{del("c"), del("b")}, `{"a":1,"d":4}`},
		{"all are deleted", `{ "a":1 , "b":2 }`, []Edit{del("b"), del("a")}, `{ }`},
		{"all are deleted, one is new", `{"a":1,"b":2}`, []Edit{del("a"), set("c", "3"), del("b")}, `{"c":3}`},
		{"the last is deleted, one is new", `{"a":1,"b":2}`, []Edit{del("b"), set("c", "3")}, `{"a":1,"c":3}`},
		{"what is absent is deleted for nothing", `{"a":1}`, []Edit{del("b")}, `{"a":1}`},
		{"of two the last counts: set, set", `{"a":1}`, []Edit{set("a", "2"), set("a", "3")}, `{"a":3}`},
		{"of two the last counts: set, delete", `{"a":1,"b":2}`, []Edit{set("a", "2"), del("a")}, `{"b":2}`},
		{"of two the last counts: delete, set", `{"a":1,"b":2}`, []Edit{del("a"), set("a", "3")}, `{"a":3,"b":2}`},
		{"of two the last counts: new, new", `{}`, []Edit{set("a", "2"), set("b", "0"), set("a", "3")},
			`{"a":3,"b":0}`},
		{"of two the last counts: new, delete", `{}`, []Edit{set("a", "2"), del("a")}, `{}`},
		{"of two the last counts: delete, new", `{}`, []Edit{del("a"), set("b", "0"), set("a", "2")}, `{"a":2,"b":0}`},
		{"no value means null", `{"a":1}`, []Edit{{Name: "a"}, {Name: "b"}}, `{"a":null,"b":null}`},
		{"a long value", `{"a":1,"b":2}`, []Edit{set("a", long), set("c", long)}, `{"a":` + long + `,"b":2,"c":` +
			long + `}`},
		{"a dot in a name makes no path", `{"a":{"b":1}}`, []Edit{set("a.b", "2")}, `{"a":{"b":1},"a.b":2}`},
		{"signs of paths mean nothing", `{"a":1,"*":2,"a|b":3}`,
			[]Edit{set("*", "0"), set("a|b", "0"), set("#", "0"), set("@x", "0"), set("9", "0"), del("?")},
			`{"a":1,"*":0,"a|b":0,"#":0,"@x":0,"9":0}`},
		{"a name is escaped", `{}`, []Edit{set("q\"\\\n\x01<&é", "1")}, `{"q\"\\\n\u0001<&é":1}`},
		{"bad UTF-8 in two names makes no member twice", `{}`, []Edit{set("\xff", "1"), set("\xfe", "2")},
			"{\"\uFFFD\":2}"},
		{"bad UTF-8 finds the member it would double", `{"\ufffd":0}`, []Edit{set("\xff", "1")}, `{"\ufffd":1}`},
		{"case counts", `{"stream":true}`, []Edit{set("Stream", "1")}, `{"stream":true,"Stream":1}`},
		{"digits of others are kept", `{"seed":9007199254740993,"t":1.0e0,"x":1}`, []Edit{set("x", "2")},
			`{"seed":9007199254740993,"t":1.0e0,"x":2}`},
		{"bad text of others is kept", "{\"p\":\"\xff\\ud800<&\",\"x\":1}", []Edit{set("x", "2")},
			"{\"p\":\"\xff\\ud800<&\",\"x\":2}"},
		{"a scalar is replaced whole", `{"kv":null,"p":7}`, []Edit{set("kv", `{"a":1}`), set("p", `[]`)},
			`{"kv":{"a":1},"p":[]}`},
	} {
		t.Run(c.rule, func(t *testing.T) {
			got := spliced(t, c.body, c.edits...)
			assert.Equal(t, c.want, got)
			assert.Equal(t, got, spliced(t, got, c.edits...), "the same edits again change nothing")
			_, err := Parse([]byte(got))
			assert.NoError(t, err)
		})
	}
}

func TestSpliceOfManyMembersAndEdits(t *testing.T) {
	var edits []Edit
	for i := range 500 {
		edits = append(edits, set(fmt.Sprintf("k%d", i), "0"), set(fmt.Sprintf("n%d", i%100), fmt.Sprint(i)),
			del(fmt.Sprintf("k%d", i*2)))
	}
	d, err := Parse([]byte(spliced(t, object(1000), edits...)))
	require.NoError(t, err)
	want := map[string]string{}
	for i := range 1000 {
		want[fmt.Sprintf("k%d", i)] = fmt.Sprint(i)
	}
	for _, e := range edits {
		want[e.Name] = string(e.Value)
		if e.Delete {
			delete(want, e.Name)
		}
	}
	got := map[string]string{}
	for i := range d.Len() {
		got[d.Name(i)] = string(d.Value(i))
	}
	assert.Equal(t, want, got)
}

func TestSpliceCopiesNothingThatStays(t *testing.T) {
	body := []byte(`{"messages":[{"role":"user"}],"stream":true,"model":"m"}`)
	d, err := Parse(body)
	require.NoError(t, err)
	var s Segments
	big := []byte(`"` + strings.Repeat("v", 1000) + `"`)
	d.Splice([]Edit{set("stream", "false"), {Name: "big", Value: big}}, &s)
	// {"messages":…,"stream": · false · ,"model":"m" · ,"big": · the value · }
	require.Len(t, s.parts, 6)
	assert.Same(t, &body[0], &s.parts[0][0])
	assert.Same(t, &body[bytes.Index(body, []byte(`,"model"`))], &s.parts[2][0])
	assert.Same(t, &big[0], &s.parts[4][0])
	assert.Same(t, &body[len(body)-1], &s.parts[5][0])
	for _, p := range s.parts {
		assert.Equal(t, len(p), cap(p), "an append to a part must not write into what follows")
	}
}

func TestSpliceOfTheZeroDoc(t *testing.T) {
	var d Doc
	var s Segments
	d.Splice(nil, &s)
	assert.Equal(t, `{}`, string(s.AppendTo(nil)))
	d.Splice([]Edit{set("a", "1"), del("b")}, &s)
	assert.Equal(t, `{"a":1}`, string(s.AppendTo(nil)))
}

func TestSegmentsAreUsedAgain(t *testing.T) {
	var d Doc
	var s Segments
	for _, n := range []int{3, 500, 0, 1, 40} {
		body := object(n)
		require.NoError(t, d.ParseInto([]byte(body)))
		d.Splice([]Edit{set("k0", "7"), set("new", "8"), del("k1")}, &s)
		assert.Equal(t, spliced(t, body, set("k0", "7"), set("new", "8"), del("k1")), string(s.AppendTo(nil)))
	}
	s.Reset()
	assert.Zero(t, s.Len())
	assert.Empty(t, s.AppendTo(nil))
	assert.Nil(t, s.chosen, "pooled Segments give up memory of unusual size")
	for _, p := range s.parts[:cap(s.parts)] {
		assert.Nil(t, p, "pooled Segments pin no body")
	}
}

func TestParseAndSpliceAllocateNothing(t *testing.T) {
	for _, n := range []int{12, 200} {
		body := []byte(`{"str\u0065am":true,` + object(n)[1:])
		edits := chatEdits()
		var d Doc
		var s Segments
		allocs := testing.AllocsPerRun(100, func() {
			if d.ParseInto(body) != nil {
				panic("not parsed")
			}
			d.Splice(edits, &s)
			d.Reset()
			s.Reset()
		})
		assert.Zero(t, allocs, "%d members", n)
	}
}

func TestSetIn(t *testing.T) {
	obj := []byte(`{"do_remote_decode":true,"remote_block_ids":[[1,2]]}`)
	got, err := SetIn(obj, "do_remote_decode", []byte("false"))
	require.NoError(t, err)
	assert.Equal(t, `{"do_remote_decode":false,"remote_block_ids":[[1,2]]}`, string(got))
	got, err = SetIn(got, "remote_port", []byte("5600"))
	require.NoError(t, err)
	assert.Equal(t, `{"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_port":5600}`, string(got))
	got, err = DeleteIn(got, "remote_block_ids")
	require.NoError(t, err)
	assert.Equal(t, `{"do_remote_decode":false,"remote_port":5600}`, string(got))
	assert.Equal(t, `{"do_remote_decode":true,"remote_block_ids":[[1,2]]}`, string(obj), "the old object stays")

	for _, bad := range []string{``, `tru`, `NaN`, `1,"x":2`, `[}`} {
		_, err = SetIn(obj, "a", []byte(bad))
		assert.Error(t, err, bad)
	}
	for _, bad := range []string{`null`, `[]`, `"s"`, ``, `{"a":1,"a":2}`, `{"a":1}x`} {
		_, err = SetIn([]byte(bad), "a", []byte("1"))
		assert.Error(t, err, bad)
		_, err = DeleteIn([]byte(bad), "a")
		assert.Error(t, err, bad)
	}
}
