// SPDX-License-Identifier: Apache-2.0

// Package modelname exchanges the names by which clients ask for models for those by which engines serve them, and puts
// the clients' own back into what engines say.
package modelname

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Any stands for all names that are not given and no longer than maxAny.
const Any = "*"

// maxAny bounds, in bytes, what a client can have repeated in each event of its stream.
const maxAny = 512

// Names say by which name engines serve the model that a client asks for. The zero value and nil exchange nothing. Any
// number of goroutines may read them.
type Names struct {
	served map[string]Served   // by the clients' name
	own    map[string]Served   // by the engines' name
	public map[string][]string // by the engines' name, sorted
	longer []string            // the engines' names, the longest first
}

// Served is a name by which engines serve a model; "" if nothing is known of the name that a client has given.
type Served struct {
	Name string
	JSON json.RawMessage
}

// Of makes names from a map of clients' names to engines'.
func Of(served map[string]string) (*Names, error) {
	n := &Names{}
	for _, public := range slices.Sorted(maps.Keys(served)) {
		if err := n.Add(public, served[public]); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// Add adds a client's name, or Any.
func (n *Names) Add(public, served string) error {
	switch before, known := n.served[public]; {
	case public == "" || served == "" || served == Any:
		return fmt.Errorf("a model's name is %q or %q", "", Any)
	case !utf8.ValidString(public) || !utf8.ValidString(served):
		return fmt.Errorf("a model's name is not UTF-8")
	case known && before.Name != served:
		return fmt.Errorf("the model name %q stands for two models", public)
	case known:
		return nil
	case n.served == nil:
		n.served, n.own, n.public = map[string]Served{}, map[string]Served{}, map[string][]string{}
	}
	s := Served{served, jsonedit.Quote(served)}
	n.served[public], n.own[served] = s, s
	if public != Any {
		n.public[served] = append(n.public[served], public)
		slices.Sort(n.public[served])
	}
	if !slices.Contains(n.longer, served) {
		n.longer = append(n.longer, served)
		slices.SortFunc(n.longer, func(a, b string) int { return len(b) - len(a) })
	}
	return nil
}

// Of returns what engines get for a client's name. A name that is not given stays if it is one of the engines', or if
// adapter, which may be nil, says so.
func (n *Names) Of(asked string, adapter func(string) bool) Served {
	if n == nil || asked == "" {
		return Served{}
	}
	if s, given := n.served[asked]; given {
		return s
	}
	if s, own := n.own[asked]; own {
		return s
	}
	if len(asked) > maxAny || adapter != nil && adapter(asked) {
		return Served{}
	}
	return n.served[Any]
}

// Public returns the names, sorted, by which clients may ask for what engines serve by this one; nil if there are none.
func (n *Names) Public(served string) []string {
	if n == nil {
		return nil
	}
	return n.public[served]
}

// First returns by which name clients know what engines serve by this one: by the same if that is among its names, or
// if it has none.
func (n *Names) First(served string) string {
	public := n.Public(served)
	if len(public) == 0 || slices.Contains(public, served) {
		return served
	}
	return public[0]
}

// Hides reports whether engines have names that are not for clients.
func (n *Names) Hides() bool { return n != nil && len(n.public) > 0 }

// All returns the clients' names, sorted, without Any.
func (n *Names) All() []string {
	if n == nil {
		return nil
	}
	all := slices.Sorted(maps.Keys(n.served))
	return slices.DeleteFunc(all, func(name string) bool { return name == Any })
}

// Hide puts clients' names in place of engines' in a text that is for a client who has asked for one: that name, or for
// another model the first of its names. asked is "" if the client has named none. What has no name of a client's stays,
// and so does a name within a longer word.
func (n *Names) Hide(text, asked string) string {
	if n == nil {
		return text
	}
	mine := n.Of(asked, nil).Name
	var out strings.Builder
	from := 0
	for i := 0; i < len(text); i++ {
		if i > 0 && inName(text[:i], i-1) {
			continue
		}
		for _, served := range n.longer {
			if !strings.HasPrefix(text[i:], served) || goesOn(text[i+len(served):]) {
				continue
			}
			public := asked
			if served != mine {
				public = n.First(served)
			}
			out.WriteString(text[from:i])
			out.WriteString(public)
			from = i + len(served)
			i = from - 1
			break
		}
	}
	if from == 0 {
		return text
	}
	out.WriteString(text[from:])
	return out.String()
}

// inName reports whether the byte at i belongs to a name that may go on behind it. A dot does between two that do.
func inName(text string, i int) bool {
	return ofName(text[i]) || text[i] == '.' && i > 0 && ofName(text[i-1])
}

// goesOn reports whether a name that ends before rest goes on there.
func goesOn(rest string) bool {
	if rest == "" {
		return false
	}
	return ofName(rest[0]) || rest[0] == '.' && len(rest) > 1 && ofName(rest[1])
}

func ofName(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c >= utf8.RuneSelf ||
		strings.IndexByte("_-/@~+", c) >= 0
}
