// SPDX-License-Identifier: Apache-2.0

package yamlfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// decodeNode reads the next document. It recovers, since the YAML package has panicked on odd files before and a file
// must not end the program.
func decodeNode(dec *yaml.Decoder, n *yaml.Node) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = errors.New("yaml: cannot be read")
		}
	}()
	return dec.Decode(n)
}

// plainJSON returns JSON without the escapes that YAML lacks: \/ and pairs of \u that stand for one character. It
// returns data that is no JSON as it is.
func plainJSON(data []byte) []byte {
	if bytes.IndexByte(data, '\\') < 0 || !json.Valid(data) {
		return data
	}
	plain := make([]byte, 0, len(data))
	for i := 0; i < len(data); i++ {
		if data[i] != '\\' {
			plain = append(plain, data[i])
			continue
		}
		// A backslash is in a string, which ends with a quote: there is something after it.
		if char := pair(data[i:]); char != unicode.ReplacementChar {
			plain = utf8.AppendRune(plain, char)
			i += len(`\ud83d\ude00`) - 1
			continue
		}
		if i++; data[i] != '/' {
			plain = append(plain, '\\')
		}
		plain = append(plain, data[i])
	}
	return plain
}

// pair returns the character that two \u at the beginning of text stand for, or unicode.ReplacementChar.
func pair(text []byte) rune {
	const size = len(`\ud83d`)
	var half [2]rune
	for i := range half {
		if len(text) < size || !bytes.HasPrefix(text, []byte(`\u`)) {
			return unicode.ReplacementChar
		}
		n, err := strconv.ParseUint(string(text[2:size]), 16, 16)
		if err != nil {
			return unicode.ReplacementChar
		}
		half[i], text = rune(n), text[size:]
	}
	return utf16.DecodeRune(half[0], half[1])
}

// unreadable finds what YAML does not allow at all, with its line: the YAML package does not say the line.
func unreadable(file string, data []byte) (Fault, bool) {
	if len(data) > MaxBytes {
		return newFault(file, 1, "file", "is too large", fmt.Sprintf("at most %d MiB are read", MaxBytes>>20)), false
	}
	line := 1
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n == 1 {
			return newFault(file, line, "file", "is not UTF-8 here", "save it as UTF-8"), false
		}
		if r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0x7f {
			return newFault(file, line, "file", "has a control character here", "remove it"), false
		}
		if r == '\n' {
			line++
		}
		i += n
	}
	return Fault{}, true
}

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// countedFromZero are what the YAML package's parser reports as missing: it counts lines from 0, unlike its scanner.
var countedFromZero = []string{"<document start>", "node content", "'-' indicator", "key", "',' or ']'", "',' or '}'"}

func syntaxFault(file string, data []byte, err error) Fault {
	text, line := err.Error(), 1
	if m := yamlLine.FindStringSubmatch(text); m != nil {
		text = text[len(m[0]):]
		if n, err := strconv.Atoi(m[1]); err == nil {
			line = n
			for _, token := range countedFromZero {
				if text == "did not find expected "+token {
					line++
				}
			}
		}
	}
	// The parser reports the line of what it was reading when it stopped. Most often a tab near that line stopped it.
	rows := strings.Split(string(data), "\n")
	for _, n := range []int{line, line + 1, line - 1} {
		if n >= 1 && n <= len(rows) && strings.Contains(indentation(rows[n-1]), "\t") {
			return newFault(file, n, "yaml", "the line is indented with a tab", "indent with spaces")
		}
	}
	if name, ok := strings.CutPrefix(text, "unknown anchor '"); ok {
		name, _, _ = strings.Cut(name, "'")
		for n, row := range rows {
			if strings.Contains(row, "*"+name) {
				line = n + 1
				break
			}
		}
		return newFault(file, line, "yaml", "an alias names an anchor that is not there",
			"define it with & before its use")
	}
	return newFault(file, line, "yaml", text, "correct the syntax at or just before this line")
}

func indentation(row string) string { return row[:len(row)-len(strings.TrimLeft(row, " \t"))] }
