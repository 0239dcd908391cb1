// SPDX-License-Identifier: Apache-2.0

package lmcacheconf

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
	"strings"
)

// File is LMCache's configuration file in the making. Keys keep the order in which they were set first.
type File struct {
	order  []string
	values map[string]string
}

// Set gives a key a value; the last one wins. JSON is YAML, so values are written as JSON.
func (f *File) Set(key string, value any) {
	if f.values == nil {
		f.values = map[string]string{}
	}
	if _, there := f.values[key]; !there {
		f.order = append(f.order, key)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(value); err != nil { // of a string, number, list or checked JSON it never fails
		b.Reset()
		b.WriteString("null")
	}
	f.values[key] = strings.TrimSpace(b.String())
}

// Has says whether a key was set.
func (f *File) Has(key string) bool { _, ok := f.values[key]; return ok }

// String writes the file.
func (f *File) String() string {
	var b strings.Builder
	for _, key := range f.order {
		b.WriteString(key)
		b.WriteString(": ")
		b.WriteString(f.values[key])
		b.WriteByte('\n')
	}
	return b.String()
}

// GB writes bytes in LMCache's unit, which is 2^30 bytes. Anything above 0 stays above 0: LMCache takes 0 for "none at all".
func GB(bytes int64) json.Number {
	const unit, step = 1 << 30, 1e4
	gb := math.Round(float64(bytes)/unit*step) / step
	if bytes > 0 {
		gb = max(gb, 1/step)
	}
	return json.Number(strconv.FormatFloat(gb, 'f', -1, 64))
}
