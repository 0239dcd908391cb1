// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

const (
	msgNotString  = "expected a string"
	msgControl    = "control character in string"
	msgEscape     = "invalid escape in string"
	msgTrailing   = "bytes after the end of the value"
	msgUTF8       = "string is not UTF-8"
	msgSurrogate  = "surrogate without its pair in string"
	hexDigits     = "0123456789abcdef"
	replacementJS = `\ufffd`
)

// checkString returns the place after the string that opens at b[i] and whether it holds a backslash. Control
// characters and escapes are checked; the encoding of the text is not.
func checkString(b []byte, i int) (end int, escaped bool, err error) {
	i++
	for {
		i = nextSpecial(b, i)
		switch {
		case i == len(b):
			return i, escaped, syntax(i, msgUnterminated)
		case b[i] == '"':
			return i + 1, escaped, nil
		case b[i] != '\\':
			return i, escaped, syntax(i, msgControl)
		}
		// Escapes come in runs; a run is walked without a new search.
		for i < len(b) && b[i] == '\\' {
			n := escapeLen(b[i:])
			if n == 0 {
				return i, true, syntax(i, msgEscape)
			}
			i += n
		}
		escaped = true
	}
}

// escapeLen is the length of the escape at the start of b, 0 if it is none.
func escapeLen(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2
	case 'u':
		if _, ok := hex4(b[2:]); ok {
			return 6
		}
	}
	return 0
}

func hex4(b []byte) (rune, bool) {
	if len(b) < 4 {
		return 0, false
	}
	var r rune
	for _, c := range b[:4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// Unquote returns the text of a JSON string, quotes included in raw. It is strict where encoding/json repairs: text
// that is not UTF-8 and surrogates without their pair are errors, since two different texts would become one. Errors
// are *SyntaxError.
func Unquote(raw []byte) (string, error) {
	if len(raw) == 0 || raw[0] != '"' {
		return "", syntax(0, msgNotString)
	}
	end, escaped, err := checkString(raw, 0)
	if err != nil {
		return "", err
	}
	if end != len(raw) {
		return "", syntax(end, msgTrailing)
	}
	if err := checkUTF8(raw, 1, end-1); err != nil {
		return "", err
	}
	if !escaped {
		return string(raw[1 : end-1]), nil
	}
	text, err := appendUnescaped(make([]byte, 0, end-2), raw, 1, end-1)
	return string(text), err
}

// checkUTF8 reports the first byte of b[lo:hi] that is not UTF-8.
func checkUTF8(b []byte, lo, hi int) error {
	if utf8.Valid(b[lo:hi]) {
		return nil
	}
	for lo < hi {
		r, n := utf8.DecodeRune(b[lo:hi])
		if r == utf8.RuneError && n == 1 {
			break
		}
		lo += n
	}
	return syntax(lo, msgUTF8)
}

// appendUnescaped appends the text of b[lo:hi], the inside of a string that checkString passed.
func appendUnescaped(dst, b []byte, lo, hi int) ([]byte, error) {
	for i := lo; i < hi; {
		if b[i] != '\\' {
			dst = append(dst, b[i])
			i++
			continue
		}
		c := b[i+1]
		if c != 'u' {
			dst = append(dst, simpleEscape(c))
			i += 2
			continue
		}
		r, _ := hex4(b[i+2 : hi])
		n := 6
		if utf16.IsSurrogate(r) {
			low := rune(utf8.RuneError)
			if i+12 <= hi && b[i+6] == '\\' && b[i+7] == 'u' {
				low, _ = hex4(b[i+8 : hi])
			}
			if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
				return dst, syntax(i, msgSurrogate)
			}
			n = 12
		}
		dst = utf8.AppendRune(dst, r)
		i += n
	}
	return dst, nil
}

func simpleEscape(c byte) byte {
	switch c {
	case 'b':
		return '\b'
	case 'f':
		return '\f'
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return c // quote, backslash, slash
}

// Quote returns s as a JSON string, quotes included. Only what JSON demands is escaped, so text stays legible and
// short; each byte that is not UTF-8 becomes U+FFFD.
func Quote(s string) []byte {
	return appendQuoted(make([]byte, 0, len(s)+2), s)
}

func appendQuoted(dst []byte, s string) []byte {
	dst = append(dst, '"')
	from := 0 // start of what is copied as it is
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			if c >= 0x20 && c != '"' && c != '\\' {
				i++
				continue
			}
			dst = append(dst, s[from:i]...)
			dst = appendEscape(dst, c)
			i++
			from = i
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && n == 1 {
			dst = append(dst, s[from:i]...)
			dst = append(dst, replacementJS...)
			from = i + 1
		}
		i += n
	}
	dst = append(dst, s[from:]...)
	return append(dst, '"')
}

func appendEscape(dst []byte, c byte) []byte {
	switch c {
	case '"', '\\':
		return append(dst, '\\', c)
	case '\b':
		return append(dst, `\b`...)
	case '\f':
		return append(dst, `\f`...)
	case '\n':
		return append(dst, `\n`...)
	case '\r':
		return append(dst, `\r`...)
	case '\t':
		return append(dst, `\t`...)
	}
	return append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
}

// Int returns the value of a JSON number written as an integer that int64 holds exactly. It never rounds: a fraction,
// an exponent, a number out of range and anything that is no number give false.
func Int(raw []byte) (int64, bool) {
	if end := integerEnd(raw, 0); end <= 0 || end != len(raw) {
		return 0, false
	}
	n, err := strconv.ParseInt(string(raw), 10, 64)
	if err != nil { // out of range: n is the nearest, which nobody sent
		return 0, false
	}
	return n, true
}
