// SPDX-License-Identifier: Apache-2.0

package yamlfile_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
)

func TestYAMLBecomesJSON(t *testing.T) {
	for text, want := range map[string]string{
		"a: 1\nb: [x, yes, true, null, 0x1F, 1_000, .5, 2001-01-01]": `{"a":1,"b":["x","yes",true,null,31,1000,0.5,` +
			`"2001-01-01"]}`,
		"a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}":    `{"a":{"b":1,"c":2},"d":{"c":3,"b":1}}`,
		"a: {<<: [{b: 1}, {b: 2, c: 3}]}":          `{"a":{"b":1,"c":3}}`,
		"a: |\r\n  x\r\n":                          `{"a":"x\n"}`,
		`{"a": "http:\/\/h", "b": "\ud83d\ude00"}`: `{"a":"http://h","b":"😀"}`,
		"1: a\ntrue: b":                            `{"1":"a","true":"b"}`,
		"# nothing":                                ``,
	} {
		docs, faults := yamlfile.Read("f", []byte(text))
		require.Empty(t, faults, text)
		var got []string
		for _, d := range docs {
			got = append(got, string(d.JSON))
		}
		if want == "" {
			assert.Empty(t, got, text)
		} else if assert.Len(t, got, 1, text) {
			assert.JSONEq(t, want, got[0], text)
		}
	}
}

func TestFaultsHaveTheirLines(t *testing.T) {
	for text, want := range map[string]string{
		"a: 1\n\nb:\n  c: 1\n  c: 2": "f:5: b.c: is given twice, first on line 4; keep one of the two",
		"a: 1\nb:\n\tc: 1":           "f:3: yaml: the line is indented with a tab; indent with spaces",
		"a: 1\nb: *c": "f:2: yaml: an alias names an anchor that is not there; define it with & " +
			"before its use",
		"a: 1\nb: &b [*b]": "f:2: b[0][0]",
		"a: 1\nb: .nan":    "f:2: b: is not a number that can be used; write a finite number",
		"a: 1\nb: !secret hunter2": "f:2: b: has a YAML tag that is not known here; write the value " +
			"without a tag",
		"a: 1\n? [x]\n: 2":       "f:2: document: has a key that is not a name; write NAME: VALUE",
		"a: 1\nb: {<<: hunter2}": "f:2: b: << does not name a mapping; write <<: *ANCHOR",
		"a: 1\n---\n- hunter2":   "f:3: document: is not a mapping; write its members as NAME: VALUE",
		"a: 1\nb: \x01":          "f:2: file: has a control character here; remove it",
		"a: 1\nb: \xff":          "f:2: file: is not UTF-8 here; save it as UTF-8",
		"a: 1\nb: {c: 1": "f:2: yaml: did not find expected ',' or '}'; correct the syntax at or " +
			"just before this line",
		strings.Repeat(" ", 8<<20) + "a": "f:1: file: is too large; at most 8 MiB are read",
	} {
		_, faults := yamlfile.Read("f", []byte(text))
		if assert.NotEmpty(t, faults, "%.80q", text) {
			assert.True(t, strings.HasPrefix(faults.Sorted().Error(), want), "%.80q: %s", text, faults)
			assert.NotContains(t, faults.Error(), "hunter2")
		}
	}
}

// Nine lines of aliases stand for 10^9 nodes.
func TestAliasesAreBounded(t *testing.T) {
	text := "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c <= 'i'; c++ {
		before := "*" + string(c-1)
		text += string(c) + ": &" + string(c) + " [" + strings.TrimSuffix(strings.Repeat(before+",", 10), ",") + "]\n"
	}
	_, faults := yamlfile.Read("f", []byte(text))
	require.Len(t, faults, 1)
	assert.Contains(t, faults.Error(), "is larger than a configuration can be, with its aliases followed")
}

func TestAFaultOfADocumentIsPlacedAtItsField(t *testing.T) {
	docs, _ := yamlfile.Read("", []byte("\na:\n  b.c:\n    - x\n    -\n      d: 1\n"))
	require.Len(t, docs, 1)
	for path, want := range map[string]int{"": 2, "a": 2, `a["b.c"]`: 3, `a["b.c"][0]`: 4, `a["b.c"][1].d`: 6,
		`a["b.c"][1].e.f`: 6, "z": 2} {
		assert.Equal(t, want, docs[0].LineOf(path), path)
	}
	f := docs[0].Fault(&config.FieldError{Path: "a.x", Problem: "is odd"})
	assert.Equal(t, "line 2: a.x: is odd", f.Error())
}

func TestFaultsThatFollowFromOthersAreLeftOut(t *testing.T) {
	fault := func(line int, path, problem, remedy string) yamlfile.Fault {
		return yamlfile.Fault{File: "f", Line: line,
			FieldError: &config.FieldError{Path: path, Problem: problem, Remedy: remedy}}
	}
	faults := yamlfile.Faults{
		fault(3, "a.role", "is missing", ""),
		fault(3, "a.rol", "unknown field", "did you mean role?"),
		fault(2, "b", "is a list, not an object", ""),
		fault(2, "b.url", "is missing", ""),
		fault(2, "b", "is odd", ""),
		fault(4, "c.url", "is missing", ""),
		fault(5, "d", "is odd", ""),
	}.Sorted()
	assert.Equal(t, "f:2: b: is a list, not an object\nf:3: a.rol: unknown field; did you mean role?\nf:4: c.url: is "+
		"missing\nf:5: d: is odd",
		faults.Error())
	assert.Equal(t, "f:2: b: is a list, not an object | f:3: a.rol: unknown field; did you mean role? | f:4: c.url: "+
		"is missing | and 1 more",
		faults.Short())
}

func FuzzRead(f *testing.F) {
	f.Add([]byte("a: &a {b: *a}\n---\n- x"))
	f.Add([]byte(`{"a": "\/", "b": [1e5, .5]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		docs, faults := yamlfile.Read("f", data)
		for _, d := range docs {
			require.True(t, json.Valid(d.JSON), "%q", d.JSON)
			require.Positive(t, d.Line)
		}
		for _, one := range faults {
			require.Positive(t, one.Line)
			require.NotEmpty(t, one.Path)
			require.NotContains(t, one.Error(), "\n")
		}
	})
}
