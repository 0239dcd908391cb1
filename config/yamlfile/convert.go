// SPDX-License-Identifier: Apache-2.0

package yamlfile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pdkit/pdkit/config"
)

// budget bounds the size of all documents of a file, with aliases followed.
type budget struct{ nodes, bytes int }

func (b *budget) spent() bool { return b.nodes < 0 || b.bytes < 0 }

// converter writes one document as JSON.
type converter struct {
	doc    *Document
	budget *budget
	out    bytes.Buffer
	faults Faults

	tooDeep bool // has been told
}

func (c *converter) fault(line int, path, problem, remedy string) {
	switch {
	case path == "":
		path = "document"
	case len(path) > maxShownPath:
		path = strings.ToValidUTF8(path[:maxShownPath], "") + "…"
	}
	c.faults = append(c.faults, newFault(c.doc.File, line, path, problem, remedy))
}

// maxShownPath bounds the path in a fault: aliases can nest a field without end.
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
			c.fault(n.Line, path, "is nested too deeply",
				fmt.Sprintf("at most %d levels are read; an alias must not lead to itself", maxDepth))
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
			c.fault(key.Line, config.FieldPath(path, key.Value),
				fmt.Sprintf("is given twice, first on line %d", first), "keep one of the two")
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
