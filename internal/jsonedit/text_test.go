// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestUnquote(t *testing.T) {
	for raw, want := range map[string]string{
		`""`:                       "",
		`"abc"`:                    "abc",
		`"é😀"`:                     "é😀",
		`"\"\\\/\b\f\n\r\t"`:       "\"\\/\b\f\n\r\t",
		`"\u0041\u00e9\u20AC"`:     "Aé€",
		`"\ud83d\ude00"`:           "😀",
		`"\uD83D\uDE00x"`:          "😀x",
		`"\ufffd"`:                 "\uFFFD",
		`"\u0000"`:                 "\x00",
		"\"\x7f\"":                 "\x7f",
		`"a\\u0041"`:               `a\u0041`,
		`"` + spaces(100) + `\n"`:  spaces(100) + "\n",
		`"` + spaces(9000) + `\n"`: spaces(9000) + "\n",
	} {
		got, err := Unquote([]byte(raw))
		require.NoError(t, err, raw)
		assert.Equal(t, want, got)
		var ref string
		require.NoError(t, json.Unmarshal([]byte(raw), &ref))
		assert.Equal(t, ref, got)
	}
}

func spaces(n int) string { return strings.Repeat(" ", n) }

func TestUnquoteIsStrict(t *testing.T) {
	for _, c := range []struct {
		raw, msg string
		off      int64
	}{
		{``, msgNotString, 0},
		{`null`, msgNotString, 0},
		{` "a"`, msgNotString, 0},
		{`"`, msgUnterminated, 1},
		{`"a`, msgUnterminated, 2},
		{`"\"`, msgUnterminated, 3},
		{`"\`, msgEscape, 1},
		{`"a"b`, msgTrailing, 3},
		{`"a" `, msgTrailing, 3},
		{"\"a\nb\"", msgControl, 2},
		{"\"" + spaces(1000) + "\x1f\"", msgControl, 1001},
		{`"\a"`, msgEscape, 1},
		{`"\u12"`, msgEscape, 1},
		{`"\U0041"`, msgEscape, 1},
		{"\"ab\xffc\"", msgUTF8, 3},
		{"\"\xed\xa0\x80\"", msgUTF8, 1},
		{"\"\xc0\xaf\"", msgUTF8, 1},
		{`"a\ud800"`, msgSurrogate, 2},
		{`"\udc00"`, msgSurrogate, 1},
		{`"\ud800\ud800"`, msgSurrogate, 1},
		{`"\ud800\n"`, msgSurrogate, 1},
		{`"\ud800\ndc00x"`, msgSurrogate, 1},
		{`"\ud800 \udc00"`, msgSurrogate, 1},
	} {
		_, err := Unquote([]byte(c.raw))
		var se *SyntaxError
		require.ErrorAs(t, err, &se, c.raw)
		assert.Equal(t, SyntaxError{Offset: c.off, Msg: c.msg}, *se, c.raw)
	}
}

func TestQuote(t *testing.T) {
	for text, want := range map[string]string{
		"":                        `""`,
		"abc":                     `"abc"`,
		"<a href=\"x\">&'/\u2028": "\"<a href=\\\"x\\\">&'/\u2028\"",
		"\b\f\n\r\t\\\x00\x1f":    `"\b\f\n\r\t\\\u0000\u001f"`,
		"é😀\x7f\uFFFD":            "\"é😀\x7f\uFFFD\"",
		"a\xffb\xed\xa0\x80":      `"a\ufffdb\ufffd\ufffd\ufffd"`,
	} {
		got := Quote(text)
		assert.Equal(t, want, string(got))
		back, err := Unquote(got)
		require.NoError(t, err)
		assert.Equal(t, validName(text), back)
	}
}

func TestIntNeverRounds(t *testing.T) {
	for raw, want := range map[string]int64{
		"0": 0, "-0": 0, "7": 7, "-12": -12, "9007199254740993": 9007199254740993,
		"9223372036854775807": math.MaxInt64, "-9223372036854775808": math.MinInt64,
	} {
		got, ok := Int([]byte(raw))
		assert.True(t, ok, raw)
		assert.Equal(t, want, got, raw)
	}
	for _, raw := range []string{
		"", " 1", "1 ", "+1", "01", "-", "1.0", "1e3", "1E0", "0x10", "1_000", `"12"`, "true", "null", "{}", "[1]",
		"NaN",
		"9223372036854775808", "-9223372036854775809", "18446744073709551615", strings.Repeat("9", 1000),
	} {
		got, ok := Int([]byte(raw))
		assert.False(t, ok, raw)
		assert.Zero(t, got, raw)
	}
}

func TestKind(t *testing.T) {
	for raw, want := range map[string]ValueKind{
		"null": Null, "true": Bool, "false": Bool, "0": Number, "-1": Number, "9e9": Number, `"s"`: String,
		"{}": Object, "[]": Array,
		" \t\r\n[": Array, "": Invalid, "  ": Invalid, "x": Invalid, "NaN": Invalid, "+1": Invalid, "]": Invalid,
		",": Invalid,
	} {
		assert.Equal(t, want, Kind([]byte(raw)), "%q", raw)
	}
	assert.Equal(t, "object", Object.String())
	assert.Equal(t, "invalid", ValueKind(99).String())
}
