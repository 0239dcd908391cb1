// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"bytes"
	"math"
)

// MaxMembers is how many members the top level may have. Requests have dozens; the limit bounds the memory that a body
// made to have many can claim.
const MaxMembers = 10_000

const (
	msgNoObject  = "expected an object"
	msgName      = "expected a member name in quotes"
	msgColon     = "expected a colon after the member name"
	msgValue     = "expected a value"
	msgComma     = "expected a comma or the end of the object"
	msgAfter     = "bytes after the end of the object"
	msgTooMany   = "more than 10000 members"
	msgTooLong   = "2 GiB or more"
	bomCodePoint = "\xef\xbb\xbf"
	msgBOM       = "byte order mark before the object"
)

// Member tells where a member stands in the body: its name from KeyLo to KeyHi, quotes included, its value from ValLo
// to ValHi. Offsets are in bytes.
type Member struct{ KeyLo, KeyHi, ValLo, ValHi int }

// member is a Member, where the name stands in Doc.text, if it had to be unescaped, and the name's sketch. Without
// pointers in it, an idle Doc pins no body by its index.
type member struct {
	keyLo, keyHi, valLo, valHi int32
	textLo, textHi             int32
	sketch                     uint32
}

// Doc is an indexed JSON object. It refers to the caller's bytes, which must not change while it is used. Any number of
// goroutines may read a Doc at once; none may while ParseInto or Reset runs. The zero Doc is an empty object.
type Doc struct {
	body    []byte
	open    int // place of the opening brace
	members []member
	text    []byte // names that had escapes, unescaped
	filter  uint64 // one bit for each sketch, see mayHave
	names   nameTable
	few     [fewMembers]member // what members begins as: most bodies hold no more
}

// Parse indexes the object that body holds. The top level must follow the grammar to the letter: one object and nothing
// after it, no byte order mark, names in UTF-8, values that are well formed if they are strings, numbers or literals.
// Of nested objects and arrays the brackets must match. Limits are MaxDepth and MaxMembers. Errors are *SyntaxError or
// *DuplicateError.
func Parse(body []byte) (*Doc, error) {
	d := new(Doc)
	if err := d.ParseInto(body); err != nil {
		return nil, err
	}
	return d, nil
}

// ParseInto is Parse that uses d's memory again. After an error d is an empty object.
func (d *Doc) ParseInto(body []byte) error {
	d.clear()
	d.body = body
	if err := d.parse(); err != nil {
		d.clear()
		return err
	}
	return nil
}

// Reset forgets the body, so that a pooled Doc does not keep it in memory, and gives up index memory of unusual size.
func (d *Doc) Reset() {
	d.clear()
	const usual = 512
	if cap(d.members) > usual {
		d.members = nil
	}
	if cap(d.text) > usual*8 {
		d.text = nil
	}
	d.names.shrink(2 * usual)
}

func (d *Doc) clear() {
	d.body, d.open, d.filter = nil, 0, 0
	d.members, d.text = d.members[:0], d.text[:0]
	d.names.clear()
}

func (d *Doc) parse() error {
	b := d.body
	if len(b) > math.MaxInt32 {
		return syntax(0, msgTooLong)
	}
	i := skipSpace(b, 0)
	if i == len(b) || b[i] != '{' {
		if bytes.HasPrefix(b, []byte(bomCodePoint)) {
			return syntax(0, msgBOM)
		}
		return syntax(i, msgNoObject)
	}
	d.open = i
	i = skipSpace(b, i+1)
	if i < len(b) && b[i] == '}' {
		return d.parseEnd(i + 1)
	}
	for {
		end, err := d.parseMember(i)
		if err != nil {
			return err
		}
		i = skipSpace(b, end)
		switch {
		case i == len(b):
			return syntax(i, msgUnclosed)
		case b[i] == ',':
			i = skipSpace(b, i+1)
		case b[i] == '}':
			return d.parseEnd(i + 1)
		default:
			return syntax(i, msgComma)
		}
	}
}

func (d *Doc) parseEnd(i int) error {
	if i = skipSpace(d.body, i); i != len(d.body) {
		return syntax(i, msgAfter)
	}
	return nil
}

// parseMember reads the member at i into the index and returns the place after it.
func (d *Doc) parseMember(i int) (int, error) {
	b := d.body
	var m member
	if err := d.parseName(&m, i); err != nil {
		return i, err
	}
	i = skipSpace(b, int(m.keyHi))
	if i == len(b) || b[i] != ':' {
		return i, syntax(i, msgColon)
	}
	i = skipSpace(b, i+1)
	end, err := valueEnd(b, i)
	if err != nil {
		return i, err
	}
	m.valLo, m.valHi = int32(i), int32(end)
	if d.members == nil {
		d.members = d.few[:0]
	}
	d.members = append(d.members, m)
	if len(d.members) > fewMembers {
		d.index(d.nameOf(&m))
	}
	return end, nil
}

// parseName reads the name at i and refuses one that the index has already.
func (d *Doc) parseName(m *member, i int) (err error) {
	b := d.body
	if i == len(b) || b[i] != '"' {
		return syntax(i, msgName)
	}
	if len(d.members) == MaxMembers {
		return syntax(i, msgTooMany)
	}
	m.keyLo, m.keyHi = int32(i), int32(plainEnd(b, i))
	if m.keyHi < 0 {
		if err := d.parseOddName(m); err != nil {
			return err
		}
	}
	name := d.nameOf(m)
	m.sketch = sketchOf(name)
	if find(d, name) >= 0 {
		return &DuplicateError{Name: string(name), Offset: int64(i)}
	}
	d.filter |= bitOf(m.sketch)
	return nil
}

// parseOddName reads a name that is long, or not ASCII, or has escapes.
func (d *Doc) parseOddName(m *member) error {
	b := d.body
	begin := int(m.keyLo)
	end, escaped, err := checkString(b, begin)
	if err != nil {
		return err
	}
	m.keyHi = int32(end)
	if err := checkUTF8(b, begin+1, end-1); err != nil || !escaped {
		return err
	}
	m.textLo = int32(len(d.text))
	d.text, err = appendUnescaped(d.text, b, begin+1, end-1)
	m.textHi = int32(len(d.text))
	return err
}

// valueEnd returns the place after the top-level value at b[i].
func valueEnd(b []byte, i int) (int, error) {
	end := -1
	switch Kind(b[i:]) {
	case String:
		if end = plainEnd(b, i); end >= 0 {
			return end, nil
		}
		end, _, err := checkString(b, i)
		return end, err
	case Object, Array:
		return skipContainer(b, i, 1)
	case Number:
		end = numberEnd(b, i)
	case Null, Bool:
		end = literalEnd(b, i)
	}
	if end < 0 {
		return i, syntax(i, msgValue)
	}
	return end, nil
}

func (d *Doc) nameOf(m *member) []byte {
	if m.textHi > 0 { // an escape always yields text, so 0 means none
		return d.text[m.textLo:m.textHi]
	}
	return d.body[m.keyLo+1 : m.keyHi-1]
}

// Bytes returns the whole body, nil for the zero Doc.
func (d *Doc) Bytes() []byte { return d.body }

// Len returns the number of members.
func (d *Doc) Len() int { return len(d.members) }

// Get returns the raw value of a member, without white space around it, and whether there is such a member. The bytes
// are the body's own.
func (d *Doc) Get(name string) (raw []byte, ok bool) {
	i := find(d, name)
	if i < 0 {
		return nil, false
	}
	return d.Value(i), true
}

// Name returns the unescaped name of member i, in the order of the body.
func (d *Doc) Name(i int) string { return string(d.nameOf(&d.members[i])) }

// Value returns the raw value of member i, in the order of the body.
func (d *Doc) Value(i int) []byte {
	m := &d.members[i]
	return d.body[m.valLo:m.valHi:m.valHi]
}

// Member returns where member i stands in the body.
func (d *Doc) Member(i int) Member {
	m := &d.members[i]
	return Member{int(m.keyLo), int(m.keyHi), int(m.valLo), int(m.valHi)}
}
