// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/pdkit/pdkit/discovery"
)

// Limits of one file. 10,000 engines come to about 2 MiB; the others keep some lines of nested aliases from filling the memory.
const (
	maxBytes   = 8 << 20
	maxVisits  = 2_000_000 // nodes, aliases followed
	maxHops    = 20        // from an alias to its mapping, and through merges
	maxFaults  = 100
	maxShown   = 64 // of a name that the file itself gives
	shownFault = 3
)

// Fault is one thing that is wrong with a file. It never holds a value: addresses and attributes may be secrets.
type Fault struct {
	Line    int    // from 1; 0 where it is the file as a whole
	Field   string // endpoints[2].role; "" where there is none
	Problem string // what is wrong: "is not a role"
	Remedy  string // what would be right
}

// Error returns "line 9: endpoints[2].role: is not a role; write …".
func (f *Fault) Error() string {
	var b strings.Builder
	if f.Line > 0 {
		fmt.Fprintf(&b, "line %d: ", f.Line)
	}
	if f.Field != "" {
		b.WriteString(f.Field + ": ")
	}
	b.WriteString(f.Problem)
	if f.Remedy != "" {
		b.WriteString("; " + f.Remedy)
	}
	return b.String()
}

// Faults are all that is wrong with a file, in the order of its lines, at most 100.
type Faults []*Fault

// Error returns the first three faults in one line, and how many more there are.
func (fs Faults) Error() string {
	var b strings.Builder
	for i, f := range fs {
		if i == shownFault {
			fmt.Fprintf(&b, " | and %d more", len(fs)-i)
			break
		}
		if i > 0 {
			b.WriteString(" | ")
		}
		b.WriteString(f.Error())
	}
	return b.String()
}

// Parse reads a list of endpoints: YAML or JSON, one mapping with the one key endpoints. It takes a list whole or not at
// all; the error is of type [Faults]. An empty list is written as [].
func Parse(data []byte) ([]discovery.Endpoint, error) {
	if len(data) > maxBytes {
		return nil, Faults{{Problem: "is too large", Remedy: fmt.Sprintf("at most %d MiB are read", maxBytes>>20)}}
	}
	root, fault := decode(data)
	if fault != nil {
		return nil, Faults{fault}
	}
	p := &parser{visits: maxVisits, seen: map[string]int{}, named: map[string]int{}}
	list := p.file(root)
	if len(p.faults) > 0 {
		slices.SortStableFunc(p.faults, func(a, b *Fault) int { return a.Line - b.Line })
		return nil, p.faults
	}
	return list, nil
}

// decode reads the one document of a file. The YAML package has panicked on odd files before, and a file must not end
// the process that serves requests.
func decode(data []byte) (root *yaml.Node, fault *Fault) {
	defer func() {
		if recover() != nil {
			root, fault = nil, &Fault{Problem: "is not YAML"}
		}
	}()
	dec := yaml.NewDecoder(bytes.NewReader(plainJSON(data)))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, &Fault{Problem: "is empty", Remedy: "write endpoints: [] for none"}
	case err != nil:
		return nil, syntaxFault(err)
	}
	var next yaml.Node
	if err := dec.Decode(&next); err == nil {
		return nil, &Fault{Line: next.Line, Problem: "is a second document", Remedy: "write one list"}
	} else if !errors.Is(err, io.EOF) {
		return nil, syntaxFault(err)
	}
	return doc.Content[0], nil
}

// plainJSON writes JSON without the escapes that YAML has not: \/ and the pairs of \u that stand for one character. What is no JSON stays.
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

// pair returns the character that two \u at the beginning of text stand for, or else unicode.ReplacementChar.
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

var yamlLine = regexp.MustCompile(`^yaml: line (\d+):`)

// syntaxFault takes no more than the line from the YAML package's error, which may repeat what it read.
func syntaxFault(err error) *Fault {
	f := &Fault{Problem: "is neither YAML nor JSON", Remedy: "correct the syntax"}
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		f.Line, _ = strconv.Atoi(m[1]) // digits
		f.Problem, f.Remedy = "is neither YAML nor JSON", "correct the syntax near this line"
	}
	return f
}

// parser walks one document.
type parser struct {
	faults Faults
	visits int
	seen   map[string]int // an engine's address to the line that listed it
	named  map[string]int // an endpoint's ID to that line
}

func (p *parser) fault(line int, field, problem, remedy string) {
	if len(p.faults) < maxFaults {
		p.faults = append(p.faults, &Fault{line, field, problem, remedy})
	}
}

// follow returns what an alias names, and reports whether the walk may go on.
func (p *parser) follow(n *yaml.Node) (*yaml.Node, bool) {
	for hops := 0; n.Kind == yaml.AliasNode && hops < maxHops; hops++ {
		n = n.Alias
	}
	p.visits--
	if p.visits == 0 {
		p.fault(n.Line, "", "is too large with its aliases followed", "use fewer aliases")
	}
	return n, p.visits > 0 && n.Kind != yaml.AliasNode
}

// field is one key of a mapping.
type field struct {
	name  string
	line  int // where this mapping is used, not where an alias of it is defined
	value *yaml.Node
}

// mapping lists the fields of n, each once, with those of << after its own. It reports whether n is a mapping at all.
func (p *parser) mapping(n *yaml.Node, at string, depth int) (fields []field, ok bool) {
	n, ok = p.follow(n)
	if !ok || depth > maxHops {
		return nil, false
	}
	if n.Kind != yaml.MappingNode {
		p.fault(n.Line, at, "is not a mapping", "write {NAME: VALUE}")
		return nil, false
	}
	own := map[string]int{}
	var merged []field
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, ok := p.follow(n.Content[i])
		switch {
		case !ok:
			return nil, false
		case key.ShortTag() == "!!merge":
			merged = append(merged, p.merge(n.Content[i+1], at, depth)...)
			continue
		case key.Kind != yaml.ScalarNode || key.ShortTag() == "!!null":
			p.fault(key.Line, at, "has a key that is not a name", "write NAME: VALUE")
			continue
		}
		if first, twice := own[key.Value]; twice {
			p.fault(key.Line, join(at, key.Value), fmt.Sprintf("is given twice, first on line %d", first), "keep one of the two")
			continue
		}
		own[key.Value] = key.Line
		fields = append(fields, field{key.Value, key.Line, n.Content[i+1]})
	}
	for _, f := range merged {
		if _, there := own[f.name]; !there {
			own[f.name] = f.line
			fields = append(fields, f)
		}
	}
	return fields, true
}

// merge lists the fields of the mapping, or list of mappings, that << names.
func (p *parser) merge(from *yaml.Node, at string, depth int) []field {
	target, ok := p.follow(from)
	if !ok {
		return nil
	}
	if target.Kind != yaml.SequenceNode {
		fields, _ := p.mapping(target, at, depth+1)
		return fields
	}
	var all []field
	for _, item := range target.Content {
		fields, _ := p.mapping(item, at, depth+1)
		all = append(all, fields...)
	}
	return all
}

func (p *parser) file(root *yaml.Node) []discovery.Endpoint {
	fields, ok := p.mapping(root, "", 0)
	if !ok {
		return nil
	}
	var endpoints *yaml.Node
	for _, f := range fields {
		if f.name == "endpoints" {
			endpoints = f.value
		} else {
			p.fault(f.line, join("", f.name), "unknown field", "the only one is endpoints")
		}
	}
	if endpoints == nil {
		p.fault(root.Line, "endpoints", "is missing", "write endpoints: [] for none")
		return nil
	}
	items, ok := p.follow(endpoints)
	if !ok {
		return nil
	}
	if items.Kind != yaml.SequenceNode {
		p.fault(items.Line, "endpoints", "is not a list", "write one {url, role} for each engine, or [] for none")
		return nil
	}
	list := make([]discovery.Endpoint, 0, len(items.Content))
	for i, item := range items.Content {
		if e, ok := p.endpoint(item, fmt.Sprintf("endpoints[%d]", i)); ok {
			list = append(list, e)
		}
		if p.visits <= 0 || len(p.faults) == maxFaults {
			break
		}
	}
	return list
}

const fieldNames = "known are url, role, group, zone, attributes"

func (p *parser) endpoint(n *yaml.Node, at string) (e discovery.Endpoint, ok bool) {
	fields, ok := p.mapping(n, at, 0)
	if !ok {
		return e, false
	}
	before := len(p.faults)
	var address, role field
	var rest discovery.Endpoint
	for _, f := range fields {
		switch f.name {
		case "url":
			address = f
		case "role":
			role = f
		case "group":
			rest.Group = p.text(f, at)
		case "zone":
			rest.Zone = p.text(f, at)
		case "attributes":
			rest.Attributes = p.attributes(f, at+".attributes")
		default:
			p.fault(f.line, join(at, f.name), "unknown field", fieldNames)
		}
	}
	r := p.role(role, n.Line, at)
	e, ok = p.address(address, n.Line, at, r)
	e.Group, e.Zone, e.Attributes = rest.Group, rest.Zone, rest.Attributes
	return e, ok && len(p.faults) == before
}

func (p *parser) role(f field, line int, at string) discovery.Role {
	if f.value == nil {
		p.fault(line, at+".role", "is missing", "write prefill, decode, both or encode")
		return 0
	}
	before := len(p.faults)
	name := p.text(f, at)
	r, err := discovery.ParseRole(name)
	if err != nil && len(p.faults) == before {
		p.fault(f.line, at+".role", "is not a role", "write prefill, decode, both or encode")
	}
	return r
}

func (p *parser) address(f field, line int, at string, role discovery.Role) (e discovery.Endpoint, ok bool) {
	const want = "write http://HOST:PORT or https://HOST:PORT, without user, query or fragment"
	if f.value == nil {
		p.fault(line, at+".url", "is missing", want)
		return e, false
	}
	before := len(p.faults)
	raw := p.text(f, at)
	if len(p.faults) > before {
		return e, false
	}
	e, err := discovery.New(raw, role)
	if err != nil {
		p.fault(f.line, at+".url", "is not an engine's address", want)
		return e, false
	}
	key := sameEngine(e.URL)
	if first, twice := p.seen[key]; twice {
		p.fault(f.line, at+".url", fmt.Sprintf("is listed twice, first on line %d", first), "list each engine once; one that serves both legs has role: both")
		return e, false
	}
	if first, twice := p.named[e.ID]; twice { // http://h and https://h
		p.fault(f.line, at+".url", fmt.Sprintf("has the name of the engine on line %d, since neither has a port", first), "write the ports")
		return e, false
	}
	p.seen[key], p.named[e.ID] = f.line, f.line
	return e, true
}

func (p *parser) attributes(f field, at string) map[string]string {
	fields, ok := p.mapping(f.value, at, 0)
	if !ok || len(fields) == 0 {
		return nil
	}
	m := make(map[string]string, len(fields))
	for _, a := range fields {
		m[a.name] = p.text(a, at)
	}
	return m
}

// text reads a string. Numbers are refused, not turned into text: 010 and 1_0 are numbers that would read otherwise.
func (p *parser) text(f field, at string) string {
	n, ok := p.follow(f.value)
	if !ok {
		return ""
	}
	if n.Kind == yaml.ScalarNode {
		switch n.ShortTag() {
		case "!!str", "!!timestamp": // an unquoted date is text here
			return n.Value
		}
	}
	p.fault(f.line, join(at, f.name), "is not a string", "put it in quotes")
	return ""
}

// sameEngine is equal for URLs that lead to one engine.
func sameEngine(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port) + u.Path
}

// join returns the path of a field whose name the file gives: bounded, and quoted where it is not plain.
func join(at, name string) string {
	plain := name != "" && len(name) <= maxShown
	for _, c := range name {
		plain = plain && (c == '_' || c == '-' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z')
	}
	switch {
	case plain && at == "":
		return name
	case plain:
		return at + "." + name
	case len(name) > maxShown:
		name = strings.ToValidUTF8(name[:maxShown], "") + "…"
	}
	return at + "[" + strconv.Quote(name) + "]"
}
