// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"
)

// mutant is a body that was made bad.
type mutant struct {
	what string
	body []byte
}

// badResponse is one of P's that was made bad.
type badResponse struct {
	what string
	Response
}

// with puts bad bodies in place of a response's own.
func (r Response) with(bodies []mutant) []badResponse {
	list := make([]badResponse, 0, len(bodies))
	for _, b := range bodies {
		bad := badResponse{b.what, r}
		bad.Body = b.body
		list = append(list, bad)
	}
	return list
}

// spoilHeader makes responses bad in the header that holds the handoff.
func (r Response) spoilHeader(name string) []badResponse {
	var list []badResponse
	add := func(what string, values ...string) {
		bad := badResponse{"the header " + name + " " + what, r}
		bad.Header = r.Header.Clone()
		if bad.Header[http.CanonicalHeaderKey(name)] = values; values == nil {
			bad.Header.Del(name)
		}
		list = append(list, bad)
	}
	good := r.Header.Get(name)
	add("is absent")
	add("is empty", "")
	add("is a space", " ")
	add("stands there twice", good, good+plantedValue)
	add("has a control character", good+"\x01"+plantedValue)
	add("has a line's end", good+"\r\nX-Other: "+plantedValue)
	add("has a NUL", "\x00"+good)
	add("is not ASCII", good+"\u00e9")
	add("is not UTF-8", good+"\xff")
	// far above what HTTP servers and clients take for one header
	add("has a megabyte", good+strings.Repeat("a", 1<<20))
	return list
}

// oddHeaders are values of the header that HTTP allows, and no engine gives.
func (r Response) oddHeaders(name string) []badResponse {
	var list []badResponse
	for _, value := range []string{`"`, `\`, "{}", "null", `","bootstrap_room":1,"a":"`, "%00", "<>&'", "../..",
		plantedValue} {
		bad := badResponse{fmt.Sprintf("the header %s is %s", name, value), r}
		bad.Header = r.Header.Clone()
		bad.Header.Set(name, value)
		list = append(list, bad)
	}
	return list
}

// gjsonPath is a path with dots between names, as gjson and sjson read it.
func gjsonPath(path string) string {
	names := strings.Split(path, ".")
	for i := range names {
		names[i] = gjsonName(names[i])
	}
	return strings.Join(names, ".")
}

// wholes are bodies that are no response at all. A flow does not show them to decode; a caller of its own may.
func wholes(good []byte) []mutant {
	return []mutant{
		{"it is empty", nil},
		{"it is null", []byte("null")},
		{"it is a list", []byte("[]")},
		{"it is a number", []byte("1")},
		{"it is a string", []byte(`"x"`)},
		{"it is an object without members", []byte("{}")},
		{"it is cut in half", good[:len(good)/2]},
		{"it is cut before its end", good[:max(len(good)-1, 0)]},
		{"it is followed by more", append(append([]byte{}, good...), '{')},
		{"it is nested without end", []byte(`{"kv_transfer_params":` + strings.Repeat("[", 100_000))},
		{"it is nested deeply", []byte(`{"kv_transfer_params":` + strings.Repeat("[", 5_000) +
			strings.Repeat("]", 5_000) +
			"}")},
		{"it is not UTF-8", []byte("{\"kv_transfer_params\":\"\xff\xfe\"}")},
		{"it is an error in a 200", []byte(`{"error":{"message":"` + plantedValue + `","code":500}}`)},
	}
}

// wrongKinds are values of each other kind than v's.
func wrongKinds(v gjson.Result) map[string]string {
	m := map[string]string{"null": "null", "a string": `"x"`, "a number": "1", "a boolean": "true", "a list": "[]",
		"an object": "{}"}
	switch {
	case v.IsObject():
		m["an object"] = "{}" // empty is as bad
	case v.IsArray():
		m["a list"] = "[]"
	case v.Type == gjson.String:
		delete(m, "a string")
	case v.Type == gjson.Number:
		delete(m, "a number")
	case v.IsBool():
		delete(m, "a boolean")
	}
	return m
}

// spoil makes mutants of the value at a path: absent, and of each wrong kind.
func spoil(good []byte, path string) []mutant {
	var list []mutant
	if body, err := sjson.DeleteBytes(good, path); err == nil {
		list = append(list, mutant{path + " is absent", body})
	}
	for kind, raw := range wrongKinds(gjson.GetBytes(good, path)) {
		if body, err := sjson.SetRawBytes(good, path, []byte(raw)); err == nil {
			list = append(list, mutant{path + " is " + kind, body})
		}
	}
	return list
}

// paths returns the paths of all values in v, up to a number that keeps a suite quick.
func paths(v gjson.Result, prefix string, list []string) []string {
	const enough = 150
	n := 0
	v.ForEach(func(key, inner gjson.Result) bool {
		name := gjsonName(key.String())
		if v.IsArray() {
			name = strconv.Itoa(n)
			n++
		}
		path := strings.TrimPrefix(prefix+"."+name, ".")
		if list = append(list, path); inner.IsObject() || inner.IsArray() {
			list = paths(inner, path, list)
		}
		return len(list) < enough && n < 3 // elements of a list are mostly alike
	})
	return list
}
