// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// table is the store of a reflector, for the objects of one resource in one namespace. It converts each object when it
// changes, and keeps only the result: a pod of some kilobytes becomes an endpoint of a few hundred bytes. Events that
// do not change the result (a probe's time, a container's restart count) end here.
type table[V any] struct {
	convert func(object any) (V, bool) // returns false if the object is not of the resource
	same    func(a, b V) bool
	changed func() // called for every event that changed a row, and for the first whole list
	listed  func() // called for every whole list

	mu     sync.Mutex
	rows   []*row[V] // sorted by name; names are unique
	synced bool      // a whole list has come
}

type row[V any] struct {
	name  string
	value V
}

// GetObjectMeta makes a row an object, since a reflector streams the first list into a store of its own.
func (r *row[V]) GetObjectMeta() metav1.Object { return &metav1.ObjectMeta{Name: r.name} }

var _ cache.TransformingStore = (*table[string])(nil)

// Transformer returns a function with which a reflector converts each object as it arrives, so that the objects of a
// long list are never all in memory.
func (t *table[V]) Transformer() cache.TransformFunc {
	return func(object any) (any, error) { return t.row(object) }
}

func (t *table[V]) row(object any) (*row[V], error) {
	if r, ok := object.(*row[V]); ok {
		return r, nil
	}
	name, err := nameOf(object)
	if err != nil {
		return nil, err
	}
	value, ok := t.convert(object)
	if !ok {
		return nil, fmt.Errorf("unexpected %T", object)
	}
	return &row[V]{name, value}, nil
}

func nameOf(object any) (string, error) {
	m, err := meta.Accessor(object)
	if err != nil {
		return "", err
	}
	return m.GetName(), nil
}

// Add stores a new object.
func (t *table[V]) Add(object any) error { return t.Update(object) }

// Update stores an object, new or not.
func (t *table[V]) Update(object any) error {
	r, err := t.row(object)
	if err != nil {
		return err
	}
	t.mu.Lock()
	at, found := t.find(r.name)
	switch {
	case !found:
		t.rows = slices.Insert(t.rows, at, r)
	case t.same(t.rows[at].value, r.value):
		t.mu.Unlock()
		return nil
	default:
		t.rows[at] = r
	}
	t.mu.Unlock()
	t.changed()
	return nil
}

// Delete removes an object.
func (t *table[V]) Delete(object any) error {
	name, err := nameOf(object)
	if err != nil {
		return err
	}
	t.mu.Lock()
	at, found := t.find(name)
	if found {
		t.rows = slices.Delete(t.rows, at, at+1)
	}
	t.mu.Unlock()
	if found {
		t.changed()
	}
	return nil
}

// Replace stores a whole list.
func (t *table[V]) Replace(objects []any, _ string) error {
	rows := make([]*row[V], 0, len(objects))
	for _, o := range objects {
		r, err := t.row(o)
		if err != nil {
			return err
		}
		rows = append(rows, r)
	}
	byName := func(a, b *row[V]) int { return cmp.Compare(a.name, b.name) }
	slices.SortStableFunc(rows, byName)
	rows = slices.CompactFunc(rows, func(a, b *row[V]) bool { return a.name == b.name })
	t.mu.Lock()
	equal := t.synced && slices.EqualFunc(t.rows, rows, func(a, b *row[V]) bool {
		return a.name == b.name && t.same(a.value, b.value)
	})
	if !equal {
		t.rows, t.synced = rows, true
	}
	t.mu.Unlock()
	t.listed()
	if !equal {
		t.changed()
	}
	return nil
}

// Resync does nothing.
func (t *table[V]) Resync() error { return nil }

func (t *table[V]) find(name string) (int, bool) {
	return slices.BinarySearchFunc(t.rows, name, func(r *row[V], name string) int { return cmp.Compare(r.name, name) })
}

func (t *table[V]) isSynced() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.synced
}

// snapshot returns the current rows, which are never changed. A nil table has none.
func (t *table[V]) snapshot() rows[V] {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.rows)
}

// rows is a snapshot of a table.
type rows[V any] []*row[V]

// get returns the value of that name, or the zero value.
func (r rows[V]) get(name string) (v V) {
	at, found := slices.BinarySearchFunc(r, name, func(r *row[V], name string) int { return cmp.Compare(r.name, name) })
	if found {
		v = r[at].value
	}
	return v
}
