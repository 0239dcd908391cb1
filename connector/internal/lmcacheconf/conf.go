// SPDX-License-Identifier: Apache-2.0

package lmcacheconf

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// prefix begins LMCache's own keys in kv_connector_extra_config, where they override LMCache's file.
const prefix = "lmcache."

// Entry is one setting of the engines.
type Entry struct {
	Path  string // as the configuration spells it: lmcache.enable_nixl
	Key   string // LMCache's name for it today: enable_pd
	Value json.RawMessage
}

// Config is the engines' settings in a connector's configuration.
type Config struct {
	File  []Entry // settings of LMCache's file
	Extra []Entry // settings of kv_connector_extra_config
	Gone  []Entry // settings that no LMCache reads any more; Key is the reason
}

// Split takes LMCache's own members out of a connector's configuration. The rest is for [config.Decode], which also
// says what is wrong with a configuration that is not an object.
func Split(raw json.RawMessage) (own json.RawMessage, engine map[string]json.RawMessage) {
	d, err := jsonedit.Parse(raw)
	if err != nil {
		return raw, nil
	}
	own = raw
	for i := range d.Len() {
		name := d.Name(i)
		if !known(name) {
			continue
		}
		if engine == nil {
			engine = map[string]json.RawMessage{}
		}
		engine[name] = d.Value(i)
		if own, err = jsonedit.DeleteIn(own, name); err != nil {
			return raw, nil
		}
	}
	return own, engine
}

// known reports whether LMCache has a member of that name. Every name with the prefix counts, so that [Read] reports a
// misspelt one beside LMCache's keys.
func known(name string) bool {
	key, prefixed := strings.CutPrefix(name, prefix)
	if prefixed || aliases[key] != "" || gone[key] != "" {
		return true
	}
	_, file := keys[key]
	_, ext := extra[key]
	return file || ext
}

// PD reports whether a configuration asks for transfer from engine to engine. It never fails: the connector that is
// chosen by it reports what is wrong with the configuration.
func PD(config json.RawMessage) bool {
	d, err := jsonedit.Parse(config)
	if err != nil {
		return false
	}
	for i := range d.Len() {
		key := strings.TrimPrefix(d.Name(i), prefix)
		if a := aliases[key]; a != "" {
			key = a
		}
		if key == "enable_pd" && isTrue(d.Value(i)) {
			return true
		}
	}
	return false
}

// isTrue reads a boolean as LMCache does, also from text.
func isTrue(raw json.RawMessage) bool {
	s := strings.ToLower(strings.Trim(string(raw), `" `))
	return s == "true" || s == "1"
}

// Read checks the engines' settings. pd is true if the engines transfer to each other, which changes the meaning of two
// old names. The error joins [config.FieldError]s, which hold no values.
func Read(engine map[string]json.RawMessage, pd bool) (Config, error) {
	var c Config
	var faults []error
	seen := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(engine)) {
		raw := bytes.TrimSpace(engine[name])
		if len(raw) == 0 || string(raw) == "null" {
			continue
		}
		key, prefixed := strings.CutPrefix(name, prefix)
		if a := aliases[key]; a != "" {
			key = a
		} else if a := pdAliases[key]; a != "" && pd {
			key = a
		}
		if first := seen[key]; first != "" {
			faults = append(faults, &config.FieldError{Path: name,
				Problem: "is given besides " + first + ", which means the same", Remedy: "keep one of the two"})
			continue
		}
		seen[key] = name
		e := Entry{Path: name, Key: key, Value: raw}
		fileKind, isFile := keys[key]
		extraKind, isExtra := extra[key]
		switch {
		case gone[key] != "":
			e.Key = gone[key]
			c.Gone = append(c.Gone, e)
			continue
		case isFile:
			c.File = append(c.File, e)
			faults = append(faults, check(name, raw, fileKind))
		case isExtra:
			c.Extra = append(c.Extra, e)
			faults = append(faults, check(name, raw, extraKind))
		case prefixed && strings.HasPrefix(key, "mp."):
			e.Key = name
			c.Extra = append(c.Extra, e)
			faults = append(faults, check(name, raw, anything))
		default:
			faults = append(faults, unknown(name, key))
		}
	}
	return c, errors.Join(faults...)
}

func unknown(path, key string) error {
	remedy := "LMCache has no setting of that name"
	if near := config.Nearest(key, slices.Sorted(maps.Keys(keys))); near != "" {
		remedy = "did you mean " + near + "?"
	}
	return &config.FieldError{Path: path, Problem: "unknown field", Remedy: remedy}
}

// check checks a value by its kind.
func check(path string, raw json.RawMessage, k kind) error {
	fault := func(problem, remedy string) error {
		return &config.FieldError{Path: path, Problem: problem, Remedy: remedy}
	}
	if !json.Valid(raw) {
		return fault("is not JSON", "")
	}
	s, isText := unquote(raw)
	switch k {
	case text:
		if !isText {
			return fault("is not a string", "put it in quotes")
		}
	case boolean:
		if v := strings.ToLower(s); v != "true" && v != "false" && v != "1" && v != "0" {
			return fault("is not a boolean", "write true or false")
		}
	case integer:
		if _, err := strconv.ParseInt(s, 10, 64); err != nil {
			return fault("is not a whole number", "write it without quotes")
		}
	case number:
		if _, err := strconv.ParseFloat(s, 64); err != nil {
			return fault("is not a number", "write it without quotes")
		}
	case integers:
		if _, ok := ints(raw); !ok {
			return fault("is not a list of whole numbers", "write them in [ ], one for each tensor-parallel rank")
		}
	case list:
		var texts []string
		if !isText && json.Unmarshal(raw, &texts) != nil {
			return fault("is not a list of strings", "write them in [ ]")
		}
	}
	return nil
}

// unquote returns a string's text, or the JSON of any other value.
func unquote(raw json.RawMessage) (s string, isText bool) {
	if json.Unmarshal(raw, &s) == nil {
		return s, true
	}
	return string(raw), false
}

// ints reads a list of numbers as LMCache does: it also accepts one number, or text with commas.
func ints(raw json.RawMessage) ([]int, bool) {
	var many []int
	if json.Unmarshal(raw, &many) == nil {
		return many, true
	}
	s, _ := unquote(raw)
	for part := range strings.SplitSeq(s, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(part))
		if err != nil {
			return nil, false
		}
		many = append(many, n)
	}
	return many, true
}

// Get returns a setting of LMCache's file.
func (c *Config) Get(key string) (Entry, bool) {
	for _, e := range c.File {
		if e.Key == key {
			return e, true
		}
	}
	return Entry{}, false
}

// Bool reports whether a setting is there and true.
func (c *Config) Bool(key string) bool {
	e, ok := c.Get(key)
	return ok && isTrue(e.Value)
}

// Text returns a setting's text, or its JSON if it is not a string, or "" if it is missing.
func (c *Config) Text(key string) string {
	e, _ := c.Get(key)
	s, _ := unquote(e.Value)
	return s
}

// Ints returns a setting's numbers, nil where it is missing.
func (c *Config) Ints(key string) []int {
	e, ok := c.Get(key)
	if !ok {
		return nil
	}
	n, _ := ints(e.Value)
	return n
}

// ExtraConfig returns the members of kv_connector_extra_config as plain values: text, booleans, whole numbers.
func (c *Config) ExtraConfig() map[string]any {
	m := map[string]any{}
	for _, e := range c.Extra {
		m[e.Key] = plain(e.Value)
	}
	return m
}

func plain(raw json.RawMessage) any {
	if n, err := strconv.Atoi(string(raw)); err == nil {
		return n
	}
	var v any
	_ = json.Unmarshal(raw, &v) // Read has checked it
	return v
}

// OnePort reports whether the receivers' port has one of the names that it had in 2025, when a receiver had one port. A
// receiver of today has two.
func (c *Config) OnePort() bool {
	e, ok := c.Get("pd_peer_init_port")
	return ok && len(c.Ints(e.Key)) > 0 &&
		slices.Contains([]string{"nixl_peer_port", "nixl_receiver_port"}, strings.TrimPrefix(e.Path, prefix))
}
