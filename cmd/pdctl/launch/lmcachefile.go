// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
	"strings"
)

// lmcacheOutput is what is rendered for an engine with LMCache: its settings, and LMCache's file.
type lmcacheOutput struct {
	Settings
	file lmcacheFile
}

// became notes what a setting of the connector became.
func (r *lmcacheOutput) became(given bool, key, text string) { r.noteIf(given, "config."+key, text) }

// noEffect notes that a setting of the connector changes nothing.
func (r *lmcacheOutput) noEffect(given bool, key, why string) { r.idleIf(given, "config."+key, why) }

// keep adds the file under a name.
func (r *lmcacheOutput) keep(name string) {
	r.Files = []File{{Name: name, Content: r.file.String()}}
	r.set("LMCACHE_CONFIG_FILE", name)
}

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

// gbOr is a size in LMCache's unit, or the default if the size is not known.
func gbOr(bytes, otherwise int64) json.Number {
	if bytes == 0 {
		return json.Number(strconv.FormatInt(otherwise, 10))
	}
	return lmcacheGB(bytes)
}
