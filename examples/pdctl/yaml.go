// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"
)

// maxFileBytes bounds what is read from a file; real ones have some kilobytes.
const maxFileBytes = 8 << 20

// readYAML reads the documents of a YAML stream. Those that are not mappings are left out.
func readYAML(data []byte) (docs []map[string]any, err error) {
	defer func() {
		if v := recover(); v != nil { // the YAML package has panicked on odd files before
			err = errors.New("not YAML")
		}
	}()
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var doc any
		switch err := dec.Decode(&doc); {
		case errors.Is(err, io.EOF):
			return docs, nil
		case err != nil:
			return docs, fmt.Errorf("not YAML: %w", err)
		}
		if m, ok := doc.(map[string]any); ok {
			docs = append(docs, m)
		}
	}
}

// asJSON writes a YAML value as JSON, into which all settings are strictly decoded.
func asJSON(v any) (json.RawMessage, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, errors.New("has a key or a value that JSON has no form for")
	}
	return raw, nil
}

// at walks into mappings; the result is nil where a step is missing.
func at(v any, path ...string) any {
	for _, step := range path {
		m, _ := v.(map[string]any)
		v = m[step]
	}
	return v
}

func textAt(v any, path ...string) string {
	switch v := at(v, path...).(type) {
	case string:
		return v
	case int, int64, uint64, float64, bool:
		return fmt.Sprint(v)
	}
	return ""
}

func mapAt(v any, path ...string) map[string]any {
	m, _ := at(v, path...).(map[string]any)
	return m
}

func listAt(v any, path ...string) []any {
	l, _ := at(v, path...).([]any)
	return l
}

// textsAt reads a mapping of texts.
func textsAt(v any, path ...string) map[string]string {
	out := map[string]string{}
	for k := range mapAt(v, path...) {
		out[k] = textAt(v, append(append([]string{}, path...), k)...)
	}
	return out
}
