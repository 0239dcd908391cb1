// SPDX-License-Identifier: Apache-2.0

// Package yamlfile reads YAML so that each fault is told with its line.
//
// [Read] turns the documents of a file into JSON, which [config.Decode] and others read strictly; [Document.Fault]
// leads their faults back to the lines of the file. JSON is read too, since it is YAML.
package yamlfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pdkit/pdkit/config"
)

// MaxBytes is the largest file that [Read] takes: 10,000 engines come to 2 MiB.
const MaxBytes = 8 << 20

// Limits of one file besides its size. Without them a few lines of nested aliases could fill the memory.
const (
	maxNodes     = 400_000 // after aliases are followed
	maxJSONBytes = 16 << 20
	maxDepth     = 60
)

// Document is one document of a file, as a JSON object.
type Document struct {
	File string
	Line int // of its first member
	JSON json.RawMessage

	lines map[string]int // of each field, by its path
}

// Read splits a YAML stream into its documents and leaves empty ones out. It reads on after a fault as far as the
// syntax allows, so that one run finds all faults. A field with a fault inside is null in the document. name is how
// faults name the file.
func Read(name string, data []byte) (docs []*Document, fs Faults) {
	if f, ok := unreadable(name, data); !ok {
		return nil, Faults{f}
	}
	budget := &budget{nodes: maxNodes, bytes: maxJSONBytes}
	dec := yaml.NewDecoder(bytes.NewReader(plainJSON(data)))
	for {
		var root yaml.Node
		err := decodeNode(dec, &root)
		if errors.Is(err, io.EOF) {
			return docs, fs
		}
		if err != nil {
			return docs, append(fs, syntaxFault(name, data, err))
		}
		if len(root.Content) == 0 || root.Content[0].ShortTag() == "!!null" {
			continue
		}
		d := &Document{File: name, Line: root.Content[0].Line, lines: map[string]int{}}
		if root.Content[0].Kind != yaml.MappingNode {
			fs = append(fs, newFault(name, d.Line, "document", "is not a mapping", "write its members as NAME: VALUE"))
			continue
		}
		c := &converter{doc: d, budget: budget}
		c.node("", root.Content[0], 0)
		fs = append(fs, c.faults...)
		if budget.spent() {
			return docs, fs
		}
		d.JSON = c.out.Bytes()
		docs = append(docs, d)
	}
}

// Fault places a fault of the document's JSON at the line of its field.
func (d *Document) Fault(fe *config.FieldError) Fault {
	line := d.LineOf(fe.Path)
	if fe.Path == "" {
		fe = fe.In("document")
	}
	return Fault{d.File, line, fe}
}

// Faults places all faults of err, as [config.FieldErrors] finds them.
func (d *Document) Faults(err error) (fs Faults) {
	for _, fe := range config.FieldErrors(err) {
		fs = append(fs, d.Fault(fe))
	}
	return fs
}

// LineOf returns the line of a field, or that of the nearest field around it that the file has.
func (d *Document) LineOf(path string) int {
	for path != "" {
		if line, ok := d.lines[path]; ok {
			return line
		}
		path = parentPath(path)
	}
	return d.Line
}

// parentPath cuts the last part of a path: .name, [3] or ["name"].
func parentPath(path string) string {
	if strings.HasSuffix(path, `"]`) {
		if i := strings.LastIndex(path, `["`); i >= 0 {
			return path[:i]
		}
	}
	return path[:max(strings.LastIndexAny(path, ".["), 0)]
}
