// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"reflect"
	"slices"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// view is a picker as flows of one connector see it: who can meet whom differs from connector to connector, while loads
// and all that is remembered of engines is the picker's.
type view struct {
	key viewKey
	// the connector is a pointer, or nil, as nearly all are: comparing it is cheap, and safe with any other
	direct   bool
	pairing  *pairing
	table    atomic.Pointer[table] // never nil
	building atomic.Bool
	used     atomic.Bool // since the last snapshot, or the last new view

	// The picker's lock guards the rest.
	idle int  // how often it was found unused, one time after the other
	gone bool // its loads are not counted any more
}

// viewKey is what a view is for. A connector that cannot be compared counts as the same as others of its type and name.
type viewKey struct {
	connector connector.KVConnector // if it can be compared
	kind      reflect.Type          // else
	name      string                // with it
	apart     bool                  // engines of role both take no part in pairs
}

func identify(c connector.KVConnector, apart bool) viewKey {
	if c == nil || canCompare(reflect.ValueOf(c)) {
		return viewKey{connector: c, apart: apart}
	}
	return viewKey{kind: reflect.TypeOf(c), name: c.Traits().Name, apart: apart}
}

// canCompare reports whether == can compare the value. (Value.Comparable does so too, and allocates.)
func canCompare(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Func, reflect.Map, reflect.Slice:
		return false
	case reflect.Interface:
		return v.IsNil() || canCompare(v.Elem())
	case reflect.Array:
		for i := range v.Len() {
			if !canCompare(v.Index(i)) {
				return false
			}
		}
	case reflect.Struct:
		for i := range v.NumField() { //nolint:modernize // Value.Fields allocates
			if !canCompare(v.Field(i)) {
				return false
			}
		}
	}
	return true
}

const (
	viewsMost = 16  // connectors that share a picker
	idleMost  = 100 // snapshots, and new views, that a view outlives unused: its flow is gone, or can wait for another
)

// view finds the view for a pick, among a few and without a lock, or makes it.
func (p *picker) view(in *pdflow.PickInput) *view {
	list := p.views.Load().list
	for _, v := range list {
		if v.direct && v.key.connector == in.Connector && v.key.apart == in.Both {
			return v.use()
		}
	}
	key := identify(in.Connector, in.Both)
	for _, v := range list {
		if v.key == key {
			return v.use()
		}
	}
	pairing := newPairing(in.Connector, p.opts) // the connector's code runs without the lock
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.enter(key, pairing)
}

func (v *view) use() *view {
	if !v.used.Load() { // read mostly: nobody waits for a line that another processor writes
		v.used.Store(true)
	}
	return v
}

// views are copied to be changed.
type views struct{ list []*view }

// enter returns the view of that key, with a table of the latest snapshot if it is a new one. The lock is held.
func (p *picker) enter(key viewKey, pairing *pairing) *view {
	all := p.views.Load().list
	if i := slices.IndexFunc(all, func(v *view) bool { return v.key == key }); i >= 0 {
		return all[i]
	}
	p.age()
	if all = p.views.Load().list; len(all) >= viewsMost {
		// of equals, the one that was made first
		p.drop(slices.MaxFunc(all, func(a, b *view) int { return a.idle - b.idle }))
	}
	c := key.connector
	v := &view{key: key, pairing: pairing, direct: key.kind == nil &&
		(c == nil || reflect.TypeOf(c).Kind() == reflect.Pointer)}
	v.used.Store(true)
	p.take(v)
	p.views.Store(&views{append(slices.Clone(p.views.Load().list), v)})
	return v
}

// age counts for how long views have not been used, and drops those that nobody seems to need. The lock is held.
func (p *picker) age() {
	for _, v := range p.views.Load().list {
		if v.idle++; v.used.Swap(false) {
			v.idle = 0
		}
		if v.idle > idleMost {
			p.drop(v)
		}
	}
}

// drop forgets a view. Picks that have its table still may use it. The lock is held.
func (p *picker) drop(v *view) {
	v.gone = true
	p.views.Store(&views{slices.DeleteFunc(slices.Clone(p.views.Load().list), func(x *view) bool { return x == v })})
	v.table.Load().leave()
}
