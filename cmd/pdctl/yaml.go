// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/pdkit/pdkit/config/yamlfile"
)

// readYAML reads the documents of a YAML stream in a form that pdkit does not define: Compose files, Kubernetes
// manifests.
func readYAML(file string, data []byte) ([]map[string]any, yamlfile.Faults) {
	docs, faults := yamlfile.Read(file, data)
	list := make([]map[string]any, len(docs))
	for i, d := range docs {
		dec := json.NewDecoder(bytes.NewReader(d.JSON))
		dec.UseNumber()
		if err := dec.Decode(&list[i]); err != nil {
			faults = append(faults, d.Faults(err)...)
		}
	}
	return list, faults
}

// at follows a path into mappings. It returns nil if a step is missing.
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
	case json.Number, bool:
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

// textsAt returns a mapping of texts.
func textsAt(v any, path ...string) map[string]string {
	out := map[string]string{}
	for k := range mapAt(v, path...) {
		out[k] = textAt(v, append(append([]string{}, path...), k)...)
	}
	return out
}
