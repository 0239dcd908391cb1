// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"slices"
	"unicode/utf8"
)

// Edit is one change to a member of the top level.
type Edit struct {
	Name   string // unescaped
	Value  []byte // raw JSON, trusted to be valid; empty means null
	Delete bool   // remove the member; Value is not looked at
}

// Splice lays edits over the document and leaves the result in dst, whose memory is used again. Members keep their
// order: one that is set is replaced where it stands, new ones follow the last in the order in which the edits first
// name them. Of several edits of one name the last counts; to delete what is not there does nothing. A name that is not
// UTF-8 is taken with U+FFFD for each bad byte. The result has no name twice as long as Doc has none.
//
// dst refers to the body and to the Values of edits, which must not change while dst or a Reader of it is used. Splice
// may run on one Doc from several goroutines, each with its own dst.
func (d *Doc) Splice(edits []Edit, dst *Segments) {
	edits = validNames(edits)
	dst.start(d, edits)
	body := d.body
	if len(body) == 0 {
		body = []byte("{}")
	}
	prev := -1 // the last member that stays
	dst.keep(body, 0, d.open+1)
	for i := range d.members {
		m := &d.members[i]
		e := dst.chosen[i]
		if e != 0 && edits[e-1].Delete {
			continue
		}
		// Between two that stay goes the text that followed the first, comma included; before the first that stays, the
		// text after the brace.
		if prev < 0 {
			dst.keep(body, d.open+1, int(d.members[0].keyLo))
		} else {
			dst.keep(body, int(d.members[prev].valHi), int(d.members[prev+1].keyLo))
		}
		if e == 0 {
			dst.keep(body, int(m.keyLo), int(m.valHi))
		} else {
			dst.keep(body, int(m.keyLo), int(m.valLo))
			dst.value(edits[e-1].Value)
		}
		prev = i
	}
	dst.appendNew(edits, prev < 0)
	end := d.open + 1
	if n := len(d.members); n > 0 {
		end = int(d.members[n-1].valHi)
	}
	dst.keep(body, end, len(body))
	dst.flush()
}

// start resolves which edit counts for each member and which names are new, and makes room for all the text that Splice
// writes itself.
func (s *Segments) start(d *Doc, edits []Edit) {
	s.clear()
	if n := len(d.members); cap(s.chosen) < n {
		s.chosen = make([]int32, n)
	} else {
		s.chosen = s.chosen[:n]
		clear(s.chosen)
	}
	var known map[string]int // places in s.added, once they are many
	room := 0
	for j := range edits {
		name := edits[j].Name
		room += 6*len(name) + len(`,"":null`) + min(len(edits[j].Value), copyUpTo)
		if i := find(d, name); i >= 0 {
			s.chosen[i] = int32(j + 1)
			continue
		}
		at := -1
		if known != nil {
			if k, ok := known[name]; ok {
				at = k
			}
		} else {
			for k, a := range s.added {
				if edits[a].Name == name {
					at = k
				}
			}
		}
		if at >= 0 {
			s.added[at] = int32(j)
			continue
		}
		s.added = append(s.added, int32(j))
		if known != nil {
			known[name] = len(s.added) - 1
		} else if len(s.added) > fewMembers {
			known = make(map[string]int, len(edits))
			for k, a := range s.added {
				known[edits[a].Name] = k
			}
		}
	}
	if cap(s.own) < room {
		s.own = make([]byte, 0, room)
	}
}

// appendNew writes the members that the document did not have.
func (s *Segments) appendNew(edits []Edit, first bool) {
	for _, a := range s.added {
		e := &edits[a]
		if e.Delete {
			continue
		}
		from := len(s.own)
		if !first {
			s.own = append(s.own, ',')
		}
		first = false
		s.own = appendQuoted(s.own, e.Name)
		s.own = append(s.own, ':')
		s.written(from)
		s.value(e.Value)
	}
}

// validNames spells all names as Quote does: two that Quote makes one must be one here too, or the result would hold it
// twice. The edits themselves stay as they are.
func validNames(edits []Edit) []Edit {
	for i := range edits {
		if !utf8.ValidString(edits[i].Name) {
			edits = slices.Clone(edits)
			for j := range edits {
				edits[j].Name = validName(edits[j].Name)
			}
			break
		}
	}
	return edits
}

func validName(name string) string { return string([]rune(name)) }
