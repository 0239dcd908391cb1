// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/handoff"
)

func check(raw string, ask func(*handoff.Object), blocks ...string) error {
	o := handoff.Read([]byte(raw), blocks...)
	ask(o)
	return o.Close()
}

func TestObjects(t *testing.T) {
	nothing := func(*handoff.Object) {}
	for _, good := range []string{`{}`, ` {"a":[1,{"b":null}],"c":"ü\n"} `} {
		require.NoError(t, check(good, nothing), good)
	}
	for _, bad := range []string{``, `[]`, `null`, `{"a":1,"a":2}`, `{"a":1,"\u0061":2}`, `{"a":[1,,]}`, `{"a":1}x`,
		"{\"a\":\"\xff\"}", "{\"a\":[\"\xff\"]}", `{"a":{"b":01}}`, `{"a":NaN}`, `{"a":[Infinity]}`, `"a"`, `1`} {
		require.Error(t, check(bad, nothing), bad)
	}
	require.Error(t, check(`{"ids":[1,,]}`, func(o *handoff.Object) { o.Blocks("ids", 1) }, "ids"),
		"what is not walked at first is checked by Blocks")
}

func TestKinds(t *testing.T) {
	type ask = func(*handoff.Object)
	const key = "key"
	for _, k := range []struct {
		what      string
		ask       ask
		good, bad []string // "-" is a key that is absent
	}{
		{"true", func(o *handoff.Object) { o.True(key) }, []string{"true"},
			[]string{"-", "false", "null", `"true"`, "1"}},
		{"not true", func(o *handoff.Object) { o.NotTrue(key) }, []string{"-", "false", "null"},
			[]string{"true", `"false"`, "0"}},
		{"text", func(o *handoff.Object) { o.Text(key) }, []string{`"4321"`, `"\u0041"`},
			[]string{"-", "null", `""`, "4321", `["4321"]`, `"\ud800"`}},
		{"port", func(o *handoff.Object) { o.Port(key) }, []string{"1", "65535"},
			[]string{"-", "null", "0", "65536", "-4321", "4321.5", `"4321"`, "4.321e3"}},
		{"int", func(o *handoff.Object) { o.Int(key, 0, 3) }, []string{"0", "3"},
			[]string{"-", "null", "4321", "-4321"}},
		{"optional int", func(o *handoff.Object) { o.OptionalInt(key, 1, 9) }, []string{"-", "1", "null"},
			[]string{"0", `"4321"`}},
		{"optional object", func(o *handoff.Object) { o.OptionalObject(key) }, []string{"-", "null", "{}"},
			[]string{"[4321]", `"4321"`}},
		{"optional number", func(o *handoff.Object) { o.OptionalNumber(key) }, []string{"-", "null", "1.50e+3", "0"},
			[]string{"true", `"4321"`, "[4321]"}},
		{"blocks", func(o *handoff.Object) { o.Blocks(key, 2) }, []string{"[]", "[[]]", "[[4321]]"},
			[]string{"-", "null", "[4321]", `"4321"`}},
		{"some blocks", func(o *handoff.Object) { o.SomeBlocks(key, 1) }, []string{"[4321]"},
			[]string{"-", "null", "[]", "[[4321]]"}},
	} {
		doc := func(v string) string {
			if v == "-" {
				return `{"other":true}`
			}
			return `{"other":true,"key":` + v + `}`
		}
		for _, v := range k.good {
			assert.NoError(t, check(doc(v), k.ask), "%s: %s", k.what, v)
		}
		for _, v := range k.bad {
			err := check(doc(v), k.ask)
			require.Error(t, err, "%s: %s", k.what, v)
			assert.Contains(t, err.Error(), key)
			assert.NotContains(t, err.Error(), "4321", "errors hold no values")
		}
	}
}

func TestTheFirstFaultIsKept(t *testing.T) {
	err := check(`{}`, func(o *handoff.Object) {
		o.True("first")
		o.Text("second")
		o.Port("third")
		o.OptionalInt("a", 1, 2)
	})
	assert.EqualError(t, err, "first is not true")
}

// A key that is null goes to no engine for which only an absent key has a default.
func TestWithoutNulls(t *testing.T) {
	for raw, want := range map[string]string{
		`{"a":1,"b":[1,2],"c":"null"}`:                        `{"a":1,"b":[1,2],"c":"null"}`,
		`{"a":null,"b":2,"c":null,"d":[{"a":null}],"e":null}`: `{"b":2,"d":[{"a":null}],"e":null}`,
		`{ "a" : null }`:                                      `{ }`,
		`{"x":null}`:                                          `{"x":null}`,
		`null`:                                                `null`,
	} {
		assert.Equal(t, want, string(handoff.WithoutNulls([]byte(raw), "a", "c")), raw)
	}
}
