// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func nest(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }

func object(members int) string {
	var b strings.Builder
	for i := range members {
		fmt.Fprintf(&b, `,"k%d":%d`, i, i)
	}
	return "{" + strings.TrimPrefix(b.String(), ",") + "}"
}

func TestParseFindsEachMember(t *testing.T) {
	for _, c := range []struct {
		rule, body string
		want       []string // name, value, name, value
	}{
		{"an empty object has none", `{}`, nil},
		{"white space may stand anywhere", " \t\r\n{ \t\r\n\"a\" \n: 1\t, \r\"b\"\n:\n[ ] \n}\n ",
			[]string{"a", "1", "b", "[ ]"}},
		{"order is that of the body", `{"b":1,"a":2}`, []string{"b", "1", "a", "2"}},
		{"all sorts of value", `{"a":null,"b":true,"c":false,"d":-0.5e+10,"e":"x","f":{},"g":[]}`,
			[]string{"a", "null", "b", "true", "c", "false", "d", "-0.5e+10", "e", `"x"`, "f", "{}", "g", "[]"}},
		{"digits are kept beyond 2^53", `{"a":9007199254740993,"b":1.10,"c":1E400}`,
			[]string{"a", "9007199254740993", "b", "1.10", "c", "1E400"}},
		{"an escaped name is its text", `{"str\u0065am":true}`, []string{"stream", "true"}},
		{"pairs of surrogates are one character", `{"\ud83d\ude00":1}`, []string{"\U0001F600", "1"}},
		{"every escape of JSON", `{"\"\\\/\b\f\n\r\t\u00E9":1}`, []string{"\"\\/\b\f\n\r\t\u00e9", "1"}},
		{"an empty name is a name", `{"":1}`, []string{"", "1"}},
		{"names differ by case", `{"stream":1,"STREAM":2}`, []string{"stream", "1", "STREAM", "2"}},
		{"signs of paths mean nothing", `{"a.b":1,"a":{"b":2},"*":3,"#":4,"@":5,"|":6,"?":7}`,
			[]string{"a.b", "1", "a", `{"b":2}`, "*", "3", "#", "4", "@", "5", "|", "6", "?", "7"}},
		{"quotes and brackets in strings are text", `{"a":["}","]","\"}","\\"],"b":{"[":"{"}}`,
			[]string{"a", `["}","]","\"}","\\"]`, "b", `{"[":"{"}`}},
		{"text that is not UTF-8 is left alone in values", "{\"a\":\"\xff\",\"b\":[\"\xc3\"],\"c\":\"\\ud800\"}",
			[]string{"a", "\"\xff\"", "b", "[\"\xc3\"]", "c", `"\ud800"`}},
		{"names inside of values may repeat", `{"a":{"x":1,"x":2}}`, []string{"a", `{"x":1,"x":2}`}},
	} {
		t.Run(c.rule, func(t *testing.T) {
			d, err := Parse([]byte(c.body))
			require.NoError(t, err)
			var got []string
			for i := range d.Len() {
				got = append(got, d.Name(i), string(d.Value(i)))
				m := d.Member(i)
				assert.Equal(t, `"`, c.body[m.KeyLo:m.KeyLo+1])
				assert.Equal(t, `"`, c.body[m.KeyHi-1:m.KeyHi])
				assert.Equal(t, string(d.Value(i)), c.body[m.ValLo:m.ValHi])
				raw, ok := d.Get(d.Name(i))
				assert.True(t, ok)
				assert.Equal(t, string(d.Value(i)), string(raw))
			}
			assert.Equal(t, c.want, got)
			assert.Equal(t, c.body, string(d.Bytes()))
		})
	}
}

func TestParseRefusesWhatIsNotOneObject(t *testing.T) {
	for _, c := range []struct {
		rule, body, msg string
		off             int64
	}{
		{"nothing", ``, msgNoObject, 0},
		{"white space", ` `, msgNoObject, 1},
		{"null", `null`, msgNoObject, 0},
		{"a string", `"s"`, msgNoObject, 0},
		{"a number", `12`, msgNoObject, 0},
		{"an array", `[{}]`, msgNoObject, 0},
		{"a byte order mark", "\xef\xbb\xbf{}", msgBOM, 0},
		{"text after it", `{"a":1}trailing`, msgAfter, 7},
		{"text after an empty one", `{}x`, msgAfter, 2},
		{"a second object", `{"a":1} {"b":2}`, msgAfter, 8},
		{"a NUL after it", "{}\x00", msgAfter, 2},
		{"no end", `{"a":1`, msgUnclosed, 6},
		{"no end after the brace", `{`, msgName, 1},
		{"no end after a comma", `{"a":1,`, msgName, 7},
		{"no end after a name", `{"a"`, msgColon, 4},
		{"no end after a colon", `{"a":`, msgValue, 5},
		{"no end of a name", `{"a`, msgUnterminated, 3},
		{"a name without quotes", `{a:1}`, msgName, 1},
		{"a name in single quotes", `{'a':1}`, msgName, 1},
		{"a comma before the end", `{"a":1,}`, msgName, 7},
		{"a comma at the start", `{,"a":1}`, msgName, 1},
		{"two commas", `{"a":1,,"b":2}`, msgName, 7},
		{"no comma", `{"a":1 "b":2}`, msgComma, 7},
		{"two colons", `{"a"::1}`, msgValue, 5},
		{"no colon", `{"a" 1}`, msgColon, 5},
		{"no value", `{"a":}`, msgValue, 5},
		{"half a literal", `{"a":tru}`, msgValue, 5},
		{"a literal and more", `{"a":truex}`, msgComma, 9},
		{"a literal in capitals", `{"a":NULL}`, msgValue, 5},
		{"NaN", `{"a":NaN}`, msgValue, 5},
		{"Infinity", `{"a":-Infinity}`, msgValue, 5},
		{"a plus sign", `{"a":+1}`, msgValue, 5},
		{"a leading zero", `{"a":01}`, msgComma, 6},
		{"a bare minus", `{"a":-}`, msgValue, 5},
		{"a point without digits", `{"a":1.}`, msgValue, 5},
		{"a point in front", `{"a":.5}`, msgValue, 5},
		{"an exponent without digits", `{"a":1e+}`, msgValue, 5},
		{"hexadecimal", `{"a":0x1}`, msgComma, 6},
		{"a comment", `{/**/"a":1}`, msgName, 1},
		{"other white space", "{\f}", msgName, 1},
		{"a line break in a name", "{\"a\nb\":1}", msgControl, 3},
		{"a line break in a string", "{\"a\":\"x\ny\"}", msgControl, 7},
		{"a NUL in a string", "{\"a\":\"\x00\"}", msgControl, 6},
		{"an unknown escape", `{"a":"\x41"}`, msgEscape, 6},
		{"half an escape", `{"a":"\u00g0"}`, msgEscape, 6},
		{"an escape cut off", `{"a":"\u00`, msgEscape, 6},
		{"a string that does not end", `{"a":"\"}`, msgUnterminated, 9},
		{"a nested string that does not end", `{"a":["\"]}`, msgUnterminated, 11},
		{"a bracket of the other sort", `{"a":[}`, msgBracket, 6},
		{"a brace of the other sort", `{"a":{"b":[1}]}`, msgBracket, 12},
		{"a nested value that does not end", `{"a":[[]}`, msgBracket, 8},
		{"a bracket too few", `{"a":[1,2`, msgUnclosed, 9},
		{"a bracket too many", `{"a":[]]}`, msgComma, 7},
		{"a name that is not UTF-8", "{\"ab\xff\":1}", msgUTF8, 4},
		{"a lone surrogate in a name", `{"a\ud800":1}`, msgSurrogate, 3},
		{"a low surrogate first in a name", `{"\udc00\ud800":1}`, msgSurrogate, 2},
		{"surrogate and no surrogate in a name", `{"\ud800\u0041":1}`, msgSurrogate, 2},
	} {
		t.Run(c.rule, func(t *testing.T) {
			d, err := Parse([]byte(c.body))
			assert.Nil(t, d)
			var se *SyntaxError
			require.ErrorAs(t, err, &se)
			assert.Equal(t, SyntaxError{Offset: c.off, Msg: c.msg}, *se)
			assert.Equal(t, fmt.Sprintf("invalid JSON at byte %d: %s", c.off, c.msg), err.Error())
		})
	}
}

// Short strings have a quicker check of their own when eight bytes can be read at once; it must not let through what
// the other refuses.
func TestShortStringsAreCheckedAlike(t *testing.T) {
	for _, bad := range []string{"\xff", "ab\xff", "\xed\xa0\x80", "a\nb", "\x00", "abcdefghijk\x1f", `\x`, `\u12`,
		`ab\ud800`, `abcdefghijklmnop\q`} {
		for pad := range 40 {
			_, err := Parse([]byte(`{"` + bad + `":1` + spaces(pad) + `}`))
			require.Error(t, err, "%q as a name, %d bytes before the end", bad, pad)
			value := `"` + bad + `"`
			_, err = Parse([]byte(`{"a":` + value + spaces(pad) + `}`))
			require.Equal(t, json.Valid([]byte(value)), err == nil, "%q as a value, %d bytes before the end", bad, pad)
		}
	}
	for pad := range 40 {
		d, err := Parse([]byte(`{"` + strings.Repeat("é", pad) + `":"` + strings.Repeat("x", pad) + `"` + spaces(pad) +
			`}`))
		require.NoError(t, err)
		assert.Equal(t, strings.Repeat("é", pad), d.Name(0))
		assert.Equal(t, `"`+strings.Repeat("x", pad)+`"`, string(d.Value(0)))
	}
}

func TestParseRefusesAMemberTwice(t *testing.T) {
	many := strings.TrimSuffix(object(100), "}")
	for _, c := range []struct {
		rule, body, name string
	}{
		{"side by side", `{"stream":true,"stream":true}`, "stream"},
		{"far apart", `{"kv":1,"a":2,"b":"","kv":3}`, "kv"},
		{"one of them escaped", `{"stream":true,"str\u0065am":true}`, "stream"},
		{"both escaped, in two ways", `{"\u0061":1,"\u0061\u0062":2,"a\u0062":3}`, "ab"},
		{"both empty", `{"":1,"":2}`, ""},
		{"among many, the first", many + `,"k0":1}`, "k0"},
		{"among many, the last", many + `,"k99":1}`, "k99"},
		{"among many, escaped", many + `,"k5\u0030":1}`, "k50"},
		{"before an error that follows", `{"a":1,"a":2,`, "a"},
	} {
		t.Run(c.rule, func(t *testing.T) {
			_, err := Parse([]byte(c.body))
			var de *DuplicateError
			require.ErrorAs(t, err, &de)
			assert.Equal(t, c.name, de.Name)
			assert.Equal(t, `"`, c.body[de.Offset:de.Offset+1])
			assert.Contains(t, err.Error(), fmt.Sprintf("%+q", c.name))
			assert.Contains(t, err.Error(), fmt.Sprintf("byte %d", de.Offset))
		})
	}
}

func TestErrorsShowNoMoreThanTheyMay(t *testing.T) {
	_, err := Parse([]byte("{\"a\":\"secret\x01\",\"b\":\"secret\"}"))
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "secret")

	long := strings.Repeat("é\n", 10_000)
	q := string(Quote(long))
	_, err = Parse([]byte(`{` + q + `:"secret",` + q + `:"secret"}`))
	require.Error(t, err)
	assert.Less(t, len(err.Error()), 500)
	assert.NotContains(t, err.Error(), "secret")
	assert.NotContains(t, err.Error(), "\n", "one line of log stays one line")
	var de *DuplicateError
	require.ErrorAs(t, err, &de)
	assert.Equal(t, long, de.Name)
}

func TestLimits(t *testing.T) {
	t.Run("depth of 10000 is the last, as in encoding/json", func(t *testing.T) {
		ok, bad := `{"a":`+nest(MaxDepth-1)+`}`, `{"a":`+nest(MaxDepth)+`}`
		require.True(t, json.Valid([]byte(ok)))
		require.False(t, json.Valid([]byte(bad)))
		_, err := Parse([]byte(ok))
		require.NoError(t, err)
		_, err = Parse([]byte(bad))
		require.EqualError(t, err, "invalid JSON at byte 10004: "+msgTooDeep)
	})
	t.Run("the sort of bracket is remembered at every depth", func(t *testing.T) {
		for n := 1; n < 300; n++ {
			up := strings.Repeat(`[{"a":`, n)
			down := strings.Repeat(`}]`, n)
			_, err := Parse([]byte(`{"a":` + up + "1" + down + `}`))
			require.NoError(t, err, "depth %d", n)
			for _, at := range []int{0, n - 1, 2*n - 1} {
				wrong := []byte(down)
				wrong[at] ^= '}' ^ ']'
				_, err = Parse([]byte(`{"a":` + up + "1" + string(wrong) + `}`))
				require.Error(t, err, "depth %d, bracket %d", n, at)
			}
		}
	})
	t.Run("whatever the order of the sorts", func(t *testing.T) {
		rng := rand.New(rand.NewPCG(1, 2))
		for n := range 700 {
			var up, down []byte
			for range n {
				if rng.IntN(2) == 0 {
					up, down = append(up, '['), append(down, ']')
				} else {
					up, down = append(up, `{"a":`...), append(down, '}')
				}
			}
			slices.Reverse(down)
			_, err := Parse([]byte(`{"a":` + string(up) + "1" + string(down) + `}`))
			require.NoError(t, err, "depth %d", n)
		}
	})
	t.Run("10000 members are the most", func(t *testing.T) {
		d, err := Parse([]byte(object(MaxMembers)))
		require.NoError(t, err)
		assert.Equal(t, MaxMembers, d.Len())
		_, err = Parse([]byte(object(MaxMembers + 1)))
		require.ErrorContains(t, err, msgTooMany)
	})
	t.Run("every number of members can be searched", func(t *testing.T) {
		var d Doc // memory used again, sizes mixed
		for _, n := range []int{1, 300, fewMembers, fewMembers + 1, 31, 32, 33, 5000, 64, 2, 65} {
			require.NoError(t, d.ParseInto([]byte(object(n))))
			for i := range n {
				raw, ok := d.Get(fmt.Sprintf("k%d", i))
				require.True(t, ok, "%d of %d", i, n)
				require.Equal(t, fmt.Sprint(i), string(raw))
			}
			_, ok := d.Get(fmt.Sprintf("k%d", n))
			require.False(t, ok)
			require.Equal(t, n > fewMembers, d.names.used > 0, "many members have a table")
		}
	})
}

// Each body costs the square of its length if the rule it is named for is broken: minutes, where the limit is seconds.
func TestTimeIsLinearInTheBody(t *testing.T) {
	const n = 1 << 20
	for rule, body := range map[string]string{
		"backslashes":            `{"a":"` + strings.Repeat(`\\`, n) + `"}`,
		"backslashes, nested":    `{"a":["` + strings.Repeat(`\\`, n) + `"]}`,
		"backslashes and quotes": `{"a":["` + strings.Repeat(`\\\"`, n/2) + `"]}`,
		"escaped quotes":         `{"a":"` + strings.Repeat(`\"`, n) + `"}`,
		"escape, text, escape":   `{"a":"` + strings.Repeat(`\n`+strings.Repeat("x", 70), n/50) + `"}`,
		"escapes in a name":      `{"` + strings.Repeat(`\u0061`, n/4) + `":1}`,
		"empty strings":          `{"a":[` + strings.Repeat(`"",`, n) + `""]}`,
		"brackets":               `{"a":[` + strings.Repeat(`{},[],`, n/2) + `1]}`,
		"up and down over 64": `{"a":` + strings.Repeat("[", 64) + strings.Repeat("[]", n) +
			strings.Repeat("]", 64) + `}`,
		"no end of string":           `{"a":["` + strings.Repeat(`\"`, n),
		"members up to their number": object(300_000),
	} {
		t.Run(rule, func(t *testing.T) {
			start := time.Now()
			_, _ = Parse([]byte(body))
			assert.Less(t, time.Since(start), 20*time.Second)
		})
	}
}

func TestADocIsReadByManyAtOnce(t *testing.T) {
	d, err := Parse([]byte(object(100)))
	require.NoError(t, err)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			var s Segments
			for i := range 100 {
				_, ok := d.Get(fmt.Sprintf("k%d", i))
				assert.True(t, ok)
				d.Splice([]Edit{{Name: "k7", Value: []byte("8")}}, &s)
				_ = s.AppendTo(nil)
			}
		})
	}
	all.Wait()
}

func TestADocForgets(t *testing.T) {
	var d Doc
	require.NoError(t, d.ParseInto([]byte(object(1000))))
	require.Error(t, d.ParseInto([]byte(`{"a":1,"b"}`)))
	assert.Zero(t, d.Len(), "an error leaves an empty object")
	assert.Nil(t, d.Bytes())
	_, ok := d.Get("a")
	assert.False(t, ok)

	require.NoError(t, d.ParseInto([]byte(object(1000))))
	d.Reset()
	assert.Nil(t, d.Bytes(), "a pooled Doc pins no body")
	assert.Nil(t, d.members, "nor an index of unusual size")
	assert.Nil(t, d.names.slots)
	require.NoError(t, d.ParseInto([]byte(object(1000))))
	assert.Equal(t, 1000, d.Len())

	for range 1000 {
		require.NoError(t, d.ParseInto([]byte(`{"\u0061":1}`)))
	}
	assert.Less(t, cap(d.text), 64, "names of earlier bodies are not kept")
}

func TestAppendToAValueLeavesTheBodyAlone(t *testing.T) {
	body := []byte(`{"a":1,"b":2}`)
	d, err := Parse(body)
	require.NoError(t, err)
	raw, _ := d.Get("a")
	_ = append(raw, "xyz"...)
	assert.Equal(t, `{"a":1,"b":2}`, string(body))
}
