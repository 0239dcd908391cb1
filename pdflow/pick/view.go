// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"reflect"
	"slices"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// view is a picker's state for one connector: its pairing rules and the table made with them. Which engines form a pair
// depends on the connector; loads, cooldowns and a policy's memory belong to the picker.
type view struct {
	key viewKey
	// the connector is a pointer or nil, as nearly all are; these can be compared cheaply and safely
	direct   bool
	pairing  *pairing
	table    atomic.Pointer[table] // never nil
	building atomic.Bool
	used     atomic.Bool // since the last snapshot, or since the last new view

	// The picker's lock guards the following fields.
	idle int  // how many times in a row it was found unused
	gone bool // its loads are no longer counted
}

// viewKey says which picks share a view. A connector that Go cannot compare counts as equal to others of its type and
// name.
type viewKey struct {
	connector connector.KVConnector // if Go can compare it
	kind      reflect.Type          // if Go cannot
	name      string                // with kind
	apart     bool                  // engines of role both are in no pair
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
	viewsMost = 16 // connectors that share a picker
	// how many snapshots and new views an unused view outlives; after that its flow is gone, or can wait for a new view
	idleMost = 100
)

// view returns the view for a pick. It searches a few views without a lock, and makes one if none fits.
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
	if !v.used.Load() { // written only if needed, so that a pick does not invalidate the cache line of other processors
		v.used.Store(true)
	}
	return v
}

// views is replaced, never changed.
type views struct{ list []*view }

// enter returns the view with that key. A new view gets a table of the latest snapshot. The caller holds the lock.
func (p *picker) enter(key viewKey, pairing *pairing) *view {
	all := p.views.Load().list
	if i := slices.IndexFunc(all, func(v *view) bool { return v.key == key }); i >= 0 {
		return all[i]
	}
	p.age()
	if all = p.views.Load().list; len(all) >= viewsMost {
		// of equals, the oldest
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

// age counts how long views have been unused, and drops those that are probably no longer needed. The caller holds the
// lock.
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

// drop removes a view. Picks that already have its table may go on using it. The caller holds the lock.
func (p *picker) drop(v *view) {
	v.gone = true
	p.views.Store(&views{slices.DeleteFunc(slices.Clone(p.views.Load().list), func(x *view) bool { return x == v })})
	v.table.Load().leave()
}
