// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf8"
)

type pair struct{ name, value string }

// reference reads the members of an object with encoding/json. odd reports a name that encoding/json repairs and this
// package refuses.
func reference(body []byte) (members []pair, twice, odd bool, err error) {
	dec := json.NewDecoder(bytes.NewReader(body))
	if tok, err := dec.Token(); err != nil || tok != json.Delim('{') {
		return nil, false, false, errors.New("not an object")
	}
	seen := map[string]bool{}
	for dec.More() {
		from := dec.InputOffset()
		tok, err := dec.Token()
		if err != nil {
			return nil, false, false, err
		}
		name := tok.(string)
		spelled := body[from:dec.InputOffset()]
		if !utf8.Valid(spelled) || strings.Count(name, "\uFFFD") != strings.Count(string(spelled), "\uFFFD")+
			strings.Count(strings.ToLower(string(spelled)), `\ufffd`) {
			odd = true
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, false, false, err
		}
		twice = twice || seen[name]
		seen[name] = true
		members = append(members, pair{name, string(value)})
	}
	return members, twice, odd, nil
}

func members(d *Doc) (all []pair) {
	for i := range d.Len() {
		all = append(all, pair{d.Name(i), string(d.Value(i))})
	}
	return all
}

var fuzzSeeds = []string{
	`{}`, ` { } `, `{"a":1}`, `{"stream":true,"str\u0065am":false}`, `{"a":[{"b":"}\"]"}],"c":-1.5e+9,"d":null}`,
	`{"messages":[{"role":"user","content":"h\u00e9\\"}],"stream":true,"stream_options":{"include_usage":true},` +
		`"max_tokens":5}`,
	`{"a":"\ud800","\ud83d\ude00":"` + "\xff" + `"}`, `{"\ud800":1}`, `{"a":1,}`, `{"a":01}`, `{"a":1}{}`,
	"\xef\xbb\xbf{}", `null`, `{"a":[}`,
	`{"a":"` + strings.Repeat("text ", 60) + `\n"}`, `{"prompt":[1,2,3,4,5,6,7,8,9,10]}`,
	`{"\ufffd":1,"` + "\uFFFD" + `":2}`,
	`{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6,"g":7,"h":8,"i":9,"j":10,"k":11,"l":12,"m":13,"n":14,"o":15,"p":16,"q":17,` +
		`"a\u0062":18}`,
}

func FuzzParse(f *testing.F) {
	for _, s := range fuzzSeeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		before := bytes.Clone(body)
		d, err := Parse(body)
		if !bytes.Equal(before, body) {
			t.Fatal("the body was changed")
		}
		var refMembers []pair
		var twice, odd bool
		isObject := json.Valid(body) && Kind(body) == Object
		if isObject {
			var refErr error
			if refMembers, twice, odd, refErr = reference(body); refErr != nil {
				t.Fatalf("reference: %v", refErr)
			}
		}
		if err != nil {
			checkError(t, err, body)
			if isObject && !twice && !odd && len(refMembers) <= MaxMembers {
				t.Fatalf("refused: %v", err)
			}
			return
		}
		if twice || odd {
			t.Fatalf("accepted: twice %v, odd %v", twice, odd)
		}
		nestedValid := true
		for i := range d.Len() {
			v := d.Value(i)
			if k := Kind(v); k == Object || k == Array {
				nestedValid = nestedValid && json.Valid(v)
			} else if !json.Valid(v) {
				t.Fatalf("member %d is not valid", i)
			}
			if raw, ok := d.Get(d.Name(i)); !ok || !bytes.Equal(raw, v) {
				t.Fatalf("member %d is not found", i)
			}
		}
		if nestedValid != isObject {
			t.Fatalf("accepted, nested values valid %v, as a whole valid %v", nestedValid, isObject)
		}
		if isObject && !slices.Equal(refMembers, members(d)) {
			t.Fatalf("members\n%q, encoding/json has\n%q", members(d), refMembers)
		}
	})
}

func checkError(t *testing.T, err error, body []byte) {
	var se *SyntaxError
	var de *DuplicateError
	off := int64(-1)
	switch {
	case errors.As(err, &se):
		off = se.Offset
	case errors.As(err, &de):
		off = de.Offset
	}
	if off < 0 || off > int64(len(body)) || err.Error() == "" {
		t.Fatalf("error %v of type %T", err, err)
	}
}

func FuzzSplice(f *testing.F) {
	for i, s := range fuzzSeeds {
		f.Add([]byte(s), "stream", []byte("false"), "a", []byte(`{"x":[1]}`), "new\n", []byte(nil), uint8(i*5))
	}
	f.Fuzz(
		func(t *testing.T, body []byte, n1 string, v1 []byte, n2 string, v2 []byte, n3 string, v3 []byte,
			deletes uint8) {
			d, err := Parse(body)
			if err != nil {
				return
			}
			var edits []Edit
			for i, e := range []Edit{{Name: n1, Value: v1}, {Name: n2, Value: v2}, {Name: n3, Value: v3},
				{Name: n1, Value: v3}} {
				if i == 3 && deletes&0x80 == 0 {
					continue
				}
				e.Delete = deletes>>i&1 != 0
				if len(e.Value) > 0 && !(json.Valid(e.Value) && bytes.Equal(bytes.TrimSpace(e.Value), e.Value)) {
					e.Value = Quote(string(e.Value))
				}
				edits = append(edits, e)
			}
			var s Segments
			d.Splice(edits, &s)
			out := s.AppendTo(nil)
			if int64(len(out)) != s.Len() {
				t.Fatalf("Len %d, bytes %d", s.Len(), len(out))
			}
			if read, err := io.ReadAll(iotest.HalfReader(s.NewReader())); err != nil || !bytes.Equal(read, out) {
				t.Fatalf("reader gave %q, %v", read, err)
			}
			again, err := Parse(out)
			if err != nil {
				t.Fatalf("%q: %v", out, err)
			}
			if want := edited(members(d), edits); !slices.Equal(want, members(again)) {
				t.Fatalf("%q\nwant %q", out, want)
			}
			if json.Valid(body) && !json.Valid(out) {
				t.Fatalf("%q is no longer valid", out)
			}
			again.Splice(edits, &s)
			if !bytes.Equal(s.AppendTo(nil), out) {
				t.Fatalf("the same edits again: %q", s.AppendTo(nil))
			}
			d.Splice(nil, &s)
			if !bytes.Equal(s.AppendTo(nil), body) {
				t.Fatal("no edits, yet another body")
			}
		})
}

// edited is what Splice promises, done the slow way.
func edited(all []pair, edits []Edit) []pair {
	const gone = "\x00"
	for _, e := range edits {
		name, value := string([]rune(e.Name)), string(e.Value)
		if value == "" {
			value = "null"
		}
		if e.Delete {
			value = gone
		}
		if i := slices.IndexFunc(all, func(p pair) bool { return p.name == name }); i >= 0 {
			all[i].value = value
		} else {
			all = append(all, pair{name, value})
		}
	}
	return slices.DeleteFunc(all, func(p pair) bool { return p.value == gone })
}

func FuzzUnquote(f *testing.F) {
	for _, s := range []string{`""`, `"a\nb"`, `"\ud83d\ude00"`, `"\ud800"`, "\"\xff\"", `"\u00e9é\ufffd"`, `"a`,
		"\"\x01\"", `"a"b`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		text, err := Unquote(raw)
		var ref string
		refErr := json.Unmarshal(raw, &ref)
		if err == nil {
			if refErr != nil || ref != text {
				t.Fatalf("%q, encoding/json has %q, %v", text, ref, refErr)
			}
			if back, err := Unquote(Quote(text)); err != nil || back != text || !json.Valid(Quote(text)) {
				t.Fatalf("%q came back as %q, %v", text, back, err)
			}
			return
		}
		checkError(t, err, raw)
		if refErr == nil && Kind(raw) == String && raw[0] == '"' && raw[len(raw)-1] == '"' && utf8.Valid(raw) &&
			!strings.Contains(ref, "\uFFFD") {
			t.Fatalf("refused: %v", err)
		}
	})
}
