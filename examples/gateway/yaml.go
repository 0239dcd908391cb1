// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/pdkit/pdkit/connector/config"
)

// Limits of one file. Real ones come nowhere near them: they keep a few lines of nested aliases from filling the memory.
const (
	maxFileBytes = 4 << 20
	maxNodes     = 200_000 // after aliases are followed
	maxJSONBytes = 16 << 20
	maxDepth     = 60
)

// document is one YAML document as JSON. Strict decoding is written once, for JSON, in package connector; lines lead its faults
// back to the file.
type document struct {
	file  string
	line  int // of its first member
	json  json.RawMessage
	lines map[string]int  // of each field, by its path
	nulls map[string]bool // fields that are null, and so left out
}

// has reports whether the field is given.
func (d *document) has(path string) bool { return d.lines[path] > 0 && !d.nulls[path] }

// fault places a fault at its field's line, or at that of the nearest field around it that the file has.
func (d *document) fault(fe *config.FieldError) fault {
	line := d.lineOf(fe.Path)
	if fe.Path == "" {
		fe = fe.In("document")
	}
	return fault{file: d.file, line: line, FieldError: fe}
}

func (d *document) lineOf(path string) int {
	for path != "" {
		if line, ok := d.lines[path]; ok {
			return line
		}
		path = parentPath(path)
	}
	return d.line
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

// readYAML splits a YAML stream into documents. Empty documents are left out. It goes on after a fault as far as the
// syntax allows, so that one run shows all faults.
func readYAML(file string, data []byte) (docs []*document, fs faults) {
	if f, ok := unreadable(file, data); !ok {
		return nil, faults{f}
	}
	budget := &budget{nodes: maxNodes, bytes: maxJSONBytes}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var root yaml.Node
		err := decodeNode(dec, &root)
		if errors.Is(err, io.EOF) {
			return docs, fs
		}
		if err != nil {
			return docs, append(fs, syntaxFault(file, data, err))
		}
		if len(root.Content) == 0 || root.Content[0].ShortTag() == "!!null" {
			continue
		}
		d := &document{file: file, line: root.Content[0].Line, lines: map[string]int{}, nulls: map[string]bool{}}
		c := &converter{doc: d, budget: budget}
		if root.Content[0].Kind != yaml.MappingNode {
			fs = append(fs, d.fault(&config.FieldError{Path: "document", Problem: "is not a mapping", Remedy: "write apiVersion, kind, metadata and spec"}))
			continue
		}
		c.node("", root.Content[0], 0)
		fs = append(fs, c.faults...)
		if budget.spent() {
			return docs, fs
		}
		d.json = c.out.Bytes()
		docs = append(docs, d)
	}
}

// decodeNode reads the next document. The YAML package has panicked on odd files before; a file must not end the program
// without a word.
func decodeNode(dec *yaml.Decoder, n *yaml.Node) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = errors.New("yaml: cannot be read")
		}
	}()
	return dec.Decode(n)
}

// unreadable finds what YAML does not allow at all, with its line, which the YAML package does not tell.
func unreadable(file string, data []byte) (fault, bool) {
	if len(data) > maxFileBytes {
		return fault{file, 1, &config.FieldError{Path: "file", Problem: "is too large", Remedy: fmt.Sprintf("at most %d MiB are read", maxFileBytes>>20)}}, false
	}
	line := 1
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n == 1 {
			return fault{file, line, &config.FieldError{Path: "file", Problem: "is not UTF-8 here", Remedy: "save it as UTF-8"}}, false
		}
		if r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0x7f {
			return fault{file, line, &config.FieldError{Path: "file", Problem: "has a control character here", Remedy: "remove it"}}, false
		}
		if r == '\n' {
			line++
		}
		i += n
	}
	return fault{}, true
}

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// countedFromZero are what the YAML package's parser misses, in distinction from its scanner: then it counts lines from 0.
var countedFromZero = []string{"<document start>", "node content", "'-' indicator", "key", "',' or ']'", "',' or '}'"}

func syntaxFault(file string, data []byte, err error) fault {
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
	// The parser's line is that of what it was reading when it stopped; a tab is what most often stopped it.
	rows := strings.Split(string(data), "\n")
	for _, n := range []int{line, line + 1, line - 1} {
		if n >= 1 && n <= len(rows) && strings.Contains(indentation(rows[n-1]), "\t") {
			return fault{file, n, &config.FieldError{Path: "yaml", Problem: "the line is indented with a tab", Remedy: "indent with spaces"}}
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
		return fault{file, line, &config.FieldError{Path: "yaml", Problem: "an alias names an anchor that is not there", Remedy: "define it with & before its use"}}
	}
	return fault{file, line, &config.FieldError{Path: "yaml", Problem: text, Remedy: "correct the syntax at or just before this line"}}
}

func indentation(row string) string { return row[:len(row)-len(strings.TrimLeft(row, " \t"))] }

// budget bounds what all documents of a file come to, once aliases are followed.
type budget struct{ nodes, bytes int }

func (b *budget) spent() bool { return b.nodes < 0 || b.bytes < 0 }

// converter writes one document as JSON.
type converter struct {
	doc    *document
	budget *budget
	out    bytes.Buffer
	faults faults

	tooDeep bool // has been told
}

func (c *converter) fault(line int, path, problem, remedy string) {
	switch {
	case path == "":
		path = "document"
	case len(path) > maxShownPath:
		path = strings.ToValidUTF8(path[:maxShownPath], "") + "…"
	}
	c.faults = append(c.faults, fault{c.doc.file, line, &config.FieldError{Path: path, Problem: problem, Remedy: remedy}})
}

// maxShownPath bounds the path of a field that aliases have nested without end.
const maxShownPath = 200

func (c *converter) write(s string) {
	c.budget.bytes -= len(s)
	c.out.WriteString(s)
}

// node writes n. A fault inside writes null in its place, which counts as left out.
func (c *converter) node(path string, n *yaml.Node, depth int) {
	if c.budget.spent() {
		return
	}
	c.budget.nodes--
	switch {
	case c.budget.spent():
		c.fault(n.Line, path, "is larger than a configuration can be, with its aliases followed", "use fewer aliases")
		return
	case depth > maxDepth:
		if !c.tooDeep {
			c.fault(n.Line, path, "is nested too deeply", fmt.Sprintf("at most %d levels are read; an alias must not lead to itself", maxDepth))
		}
		c.tooDeep = true
		c.write("null")
		return
	}
	switch n.Kind {
	case yaml.AliasNode:
		c.node(path, n.Alias, depth+1)
	case yaml.MappingNode:
		c.mapping(path, n, depth)
	case yaml.SequenceNode:
		c.write("[")
		for i, item := range n.Content {
			if i > 0 {
				c.write(",")
			}
			at := path + "[" + strconv.Itoa(i) + "]"
			c.doc.lines[at] = item.Line
			c.node(at, item, depth+1)
		}
		c.write("]")
	default:
		c.scalar(path, n)
	}
}

// member is one key of a mapping with its value.
type member struct {
	name       string
	key, value *yaml.Node
}

func (c *converter) mapping(path string, n *yaml.Node, depth int) {
	c.write("{")
	for i, m := range c.members(path, n, depth) {
		if i > 0 {
			c.write(",")
		}
		at := config.FieldPath(path, m.name)
		c.doc.lines[at] = m.key.Line
		name, _ := json.Marshal(m.name) // a string always has a JSON form
		c.write(string(name) + ":")
		c.node(at, m.value, depth+1)
	}
	c.write("}")
}

// members lists a mapping's keys, each once, then those it merges in with <<.
func (c *converter) members(path string, n *yaml.Node, depth int) []member {
	var list []member
	var merges []*yaml.Node
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		for hops := 0; key.Kind == yaml.AliasNode && hops < maxDepth; hops++ {
			key = key.Alias
		}
		switch {
		case key.ShortTag() == "!!merge":
			merges = append(merges, value)
			continue
		case key.Kind != yaml.ScalarNode || key.ShortTag() == "!!null":
			c.fault(n.Content[i].Line, path, "has a key that is not a name", "write NAME: VALUE")
			continue
		}
		if first, twice := seen[key.Value]; twice {
			c.fault(key.Line, config.FieldPath(path, key.Value), fmt.Sprintf("is given twice, first on line %d", first), "keep one of the two")
			continue
		}
		seen[key.Value] = key.Line
		list = append(list, member{key.Value, key, value})
	}
	for _, m := range merges {
		list = c.merge(path, m, depth, seen, list)
	}
	return list
}

// merge adds the keys of the mapping, or list of mappings, that << names. Keys that are there already win.
func (c *converter) merge(path string, from *yaml.Node, depth int, seen map[string]int, list []member) []member {
	if c.budget.nodes--; c.budget.spent() || depth > maxDepth {
		return list
	}
	switch from.Kind {
	case yaml.AliasNode:
		return c.merge(path, from.Alias, depth+1, seen, list)
	case yaml.SequenceNode:
		for _, item := range from.Content {
			list = c.merge(path, item, depth+1, seen, list)
		}
	case yaml.MappingNode:
		for _, m := range c.members(path, from, depth+1) {
			if _, there := seen[m.name]; !there {
				seen[m.name] = m.key.Line
				list = append(list, m)
			}
		}
	default:
		c.fault(from.Line, path, "<< does not name a mapping", "write <<: *ANCHOR")
	}
	return list
}

// jsonNumber is the form of a number in JSON. YAML has more: 0x1F, 1_000, .5, +1.
var jsonNumber = regexp.MustCompile(`^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$`)

func (c *converter) scalar(path string, n *yaml.Node) {
	switch n.ShortTag() {
	case "!!str", "!!timestamp": // an unquoted date is text here
		s, _ := json.Marshal(n.Value)
		c.write(string(s))
	case "!!null":
		c.doc.nulls[path] = true
		c.write("null")
	case "!!bool":
		var b bool
		if n.Decode(&b) != nil {
			c.bad(path, n, "is not a boolean", "write true or false")
			return
		}
		c.write(strconv.FormatBool(b))
	case "!!int", "!!float":
		if jsonNumber.MatchString(n.Value) {
			c.write(n.Value)
			return
		}
		var i int64
		if n.ShortTag() == "!!int" && n.Decode(&i) == nil {
			c.write(strconv.FormatInt(i, 10))
			return
		}
		var f float64
		if n.Decode(&f) != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			c.bad(path, n, "is not a number that can be used", "write a finite number")
			return
		}
		c.write(strconv.FormatFloat(f, 'g', -1, 64))
	default:
		c.bad(path, n, "has a YAML tag that is not known here", "write the value without a tag")
	}
}

func (c *converter) bad(path string, n *yaml.Node, problem, remedy string) {
	c.fault(n.Line, path, problem, remedy)
	c.write("null")
}
