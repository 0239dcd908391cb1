// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
	"strings"
)

// lmcacheFile builds LMCache's configuration file. Keys keep the order in which they were first set.
type lmcacheFile struct {
	order  []string
	values map[string]string
}

// Set gives a key a value and replaces an earlier one. Values are written as JSON, which is also YAML.
func (f *lmcacheFile) Set(key string, value any) {
	if f.values == nil {
		f.values = map[string]string{}
	}
	if _, there := f.values[key]; !there {
		f.order = append(f.order, key)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(value); err != nil { // this cannot fail for a string, number, list or checked JSON
		b.Reset()
		b.WriteString("null")
	}
	f.values[key] = strings.TrimSpace(b.String())
}

// Has reports whether a key was set.
func (f *lmcacheFile) Has(key string) bool { _, ok := f.values[key]; return ok }

// String writes the file.
func (f *lmcacheFile) String() string {
	var b strings.Builder
	for _, key := range f.order {
		b.WriteString(key)
		b.WriteString(": ")
		b.WriteString(f.values[key])
		b.WriteByte('\n')
	}
	return b.String()
}

// lmcacheGB converts bytes to LMCache's unit of 2^30 bytes. A size above 0 stays above 0, since 0 means "none at all"
// to LMCache.
func lmcacheGB(bytes int64) json.Number {
	const unit, step = 1 << 30, 1e4
	gb := math.Round(float64(bytes)/unit*step) / step
	if bytes > 0 {
		gb = max(gb, 1/step)
	}
	return json.Number(strconv.FormatFloat(gb, 'f', -1, 64))
}
