// SPDX-License-Identifier: Apache-2.0

// Package names knows by which names an engine's error text may speak of engines: no client may read them.
package names

import (
	"net"
	"net/url"
	"strings"
	"sync/atomic"
	"unicode"

	"github.com/pdkit/pdkit/discovery"
)

// Of calls add with each name of an engine, in lower case: its ID, the last part of that (a pod's name), its host, its
// node, and the hosts and IDs among its attributes. What has no letters, or one byte, is no name: any number in a text
// would look like it.
func Of(e *discovery.Endpoint, add func(name string)) {
	each := func(name string) {
		name = strings.ToLower(name)
		if len(name) > 1 && strings.ContainsFunc(name, unicode.IsLetter) {
			add(name)
		}
	}
	each(e.ID)
	if i := strings.LastIndexByte(e.ID, '/'); i >= 0 && strings.ContainsAny(e.ID[i+1:], "-_.0123456789") {
		each(e.ID[i+1:])
	}
	each(e.Host())
	each(e.Node)
	for key, list := range e.Attributes {
		for value := range strings.SplitSeq(list, ",") {
			value = strings.TrimSpace(value)
			switch host, _, err := net.SplitHostPort(value); {
			case strings.HasSuffix(key, "ID"), strings.HasSuffix(key, "Host"):
				each(value)
			case strings.Contains(value, "://"):
				if u, err := url.Parse(value); err == nil {
					each(u.Hostname())
				}
			case err == nil:
				each(host)
			}
		}
	}
}

// Index finds names of the engines of a set. The zero Index is ready, and any goroutine may use it.
type Index struct{ last atomic.Pointer[table] }

type table struct {
	of    *discovery.Snapshot
	names map[string]bool
}

// Has reports whether a word in lower case names an engine of s. It makes a table of a snapshot that it has not seen.
func (x *Index) Has(s *discovery.Snapshot, word string) bool {
	t := x.last.Load()
	if t == nil || t.of != s {
		t = &table{of: s, names: make(map[string]bool, 2*len(s.Endpoints))}
		for i := range s.Endpoints {
			Of(&s.Endpoints[i], func(name string) { t.names[name] = true })
		}
		x.last.Store(t)
	}
	return t.names[word]
}
