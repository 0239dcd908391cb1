// SPDX-License-Identifier: Apache-2.0

package modelname_test

import (
	"encoding/json"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/jsonedit"
	"github.com/pdkit/pdkit/internal/modelname"
)

func names(t testing.TB, served map[string]string) *modelname.Names {
	t.Helper()
	n, err := modelname.Of(served)
	require.NoError(t, err)
	return n
}

func TestWhatEnginesGetForAName(t *testing.T) {
	n := names(t, map[string]string{"a": "base", "b": "lora", "*": "other", "base": "base"})
	adapter := func(model string) bool { return model == "c-lora" || model == "a" }
	for asked, want := range map[string]string{"a": "base", "b": "lora", "base": "base", "lora": "lora",
		"other": "other", "c-lora": "", "x": "other", "": "", "*": "other"} {
		assert.Equal(t, want, n.Of(asked, adapter).Name, asked)
	}
	assert.Equal(t, "other", n.Of(strings.Repeat("x", 512), nil).Name)
	assert.Empty(t, n.Of(strings.Repeat("x", 513), nil).Name, "each event would repeat it")
	assert.Equal(t, `"b\"se"`, string(names(t, map[string]string{"a": `b"se`}).Of("a", nil).JSON))
	assert.Equal(t, []string{"a", "b", "base"}, n.All())
	assert.Equal(t, []string{"a", "base"}, n.Public("base"))
	var none *modelname.Names
	assert.Zero(t, none.Of("a", nil))
	assert.Empty(t, none.All())
	assert.Empty(t, none.Public("a"))
	assert.Equal(t, "a", none.Hide("a", "b"))
}

func TestTextsForClients(t *testing.T) {
	n := names(t, map[string]string{"gpt-4o": "big", "gpt-4": "big", "b": "some-lora", "c": "/models/big",
		"*": "v1.2", "org": "org/big"})
	for said, want := range map[string]string{
		"The model `big` does not exist.": "The model `gpt-4o` does not exist.",
		"big":                             "gpt-4o",
		"big, big":                        "gpt-4o, gpt-4o",
		"model:big:x=big.":                "model:gpt-4o:x=gpt-4o.",
		"bigger big-2 a/big big.1 x.big Big bigé": "bigger big-2 a/big big.1 x.big Big bigé",
		"['big', \"some-lora\"]":                  "['gpt-4o', \"b\"]",
		"/models/big and org/big":                 "c and org",
		"v1.2 v1.2.3 v1.2.":                       "v1.2 v1.2.3 v1.2.", "": "", "none": "none",
	} {
		assert.Equal(t, want, n.Hide(said, "gpt-4o"), said)
	}
	assert.Equal(t, "whatever, gpt-4", n.Hide("v1.2, big", "whatever"), "the one asked for; another's first")
}

func TestWhereAResponseNamesItsModel(t *testing.T) {
	put := names(t, nil).PutBack(`a "b"`)
	for said, want := range map[string]string{
		`{"model":"big","n":1}`:                           `{"model":"a \"b\"","n":1}`,
		`{"n":{"model":"big"},"model" :  "b\"ig" }`:       `{"n":{"model":"big"},"model" :  "a \"b\"" }`,
		`{"response":{"model":"big"}}`:                    `{"response":{"model":"a \"b\""}}`,
		`{"message":{"x":{"model":"big"},"model":"M"}}`:   `{"message":{"x":{"model":"big"},"model":"a \"b\""}}`,
		`{"item":{"model":"big"}}`:                        `{"item":{"model":"big"}}`,
		`{"message":"model","response":"\"model\":\"\""}`: `{"message":"model","response":"\"model\":\"\""}`,
		`{"model":null}`:                                  `{"model":null}`,
		`["model"]`:                                       `["model"]`,
		``:                                                ``, `{"model":`: `{"model":`,
	} {
		assert.Equal(t, want, string(put([]byte(said))), said)
	}
	unnamed := names(t, map[string]string{"first": "big", "second": "big", "own": "own", "o": "own"}).PutBack("")
	for said, want := range map[string]string{"big": "first", "own": "own", "x": "x"} {
		assert.Equal(t, `{"model":"`+want+`"}`, string(unnamed([]byte(`{"model":"`+said+`"}`))))
	}
	event := []byte(`{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"big","choices":[]}`)
	assert.Zero(t, testing.AllocsPerRun(100, func() { put(event) }), "an event of a stream")
}

// A whole response is what it would be in one piece, however it comes.
func FuzzReader(f *testing.F) {
	for _, seed := range []string{`{"model":"big","a":"model"}`,
		`{"a":{"model":"x"},"b":"\"model\":\"y\"","model":"z"}`,
		`["model","x"]`, `{"model":{"model":"x"}}`, `{"model":null,"b":[{"model":"x"}]}`, `{"model" : "a\\\"b" }`} {
		f.Add([]byte(seed))
	}
	n := names(f, map[string]string{"first": "big"})
	f.Fuzz(func(t *testing.T, raw []byte) {
		got, err := io.ReadAll(n.Reader(strings.NewReader(string(raw)), `new "name"`))
		require.NoError(t, err)
		slow, err := io.ReadAll(iotest.OneByteReader(n.Reader(iotest.OneByteReader(
			strings.NewReader(string(raw))), `new "name"`)))
		require.NoError(t, err)
		require.Equal(t, string(got), string(slow))
		if _, err := jsonedit.Parse(raw); err != nil || !json.Valid(raw) || strings.Contains(string(raw), `\u`) {
			return
		}
		require.True(t, json.Valid(got), "%s", got)
		unnamed, err := io.ReadAll(n.Reader(strings.NewReader(string(raw)), ""))
		require.NoError(t, err)
		require.JSONEq(t, string(n.PutBack("")(onlyTop(t, raw))), string(onlyTop(t, unnamed)))
		require.Equal(t, string(n.PutBack(`new "name"`)(onlyTop(t, raw))), string(onlyTop(t, got)))
	})
}

// onlyTop is an object without the places where only events have the name.
func onlyTop(t *testing.T, raw []byte) []byte {
	t.Helper()
	for _, name := range []string{"response", "message"} {
		var err error
		raw, err = jsonedit.DeleteIn(raw, name)
		require.NoError(t, err)
	}
	return raw
}
