// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
)

// After a failure the watch pauses before it calls again. The pause doubles from the first to the last constant. After
// a watch that lived longer than the last one, it starts again with the first.
const (
	firstModelServerPause = 100 * time.Millisecond
	lastModelServerPause  = 5 * time.Second
)

const (
	modelServerListTimeout = 30 * time.Second
	modelServerWatchGrace  = 30 * time.Second // for a server that does not end a watch on request
)

// modelServerWatch keeps the objects of one group. It lists them and watches for changes; when the watch has ended, for
// whatever reason, it lists them again. The objects are few, and a new list is correct whatever happened meanwhile.
type modelServerWatch struct {
	*ModelServers
	resource string // its name in errors
	client   dynamic.ResourceInterface
	troubles *troubles
	changed  func() // wakes the goroutine that publishes

	table   *table[ModelServer]
	without atomic.Bool // the definition is not installed
	missing int         // how many looks in a row found no definition
}

func (m *ModelServers) newWatch(group string, t *troubles, changed func()) *modelServerWatch {
	of := schema.GroupVersionResource{Group: group, Version: "v1alpha1", Resource: "modelservers"}
	w := &modelServerWatch{ModelServers: m, resource: of.GroupResource().String(),
		client: m.client.Resource(of).Namespace(m.namespace), troubles: t, changed: changed}
	w.table = &table[ModelServer]{convert: readModelServer, same: sameModelServer, changed: changed, listed: func() {}}
	return w
}

func (w *modelServerWatch) run(ctx context.Context) {
	pause := firstModelServerPause
	for ctx.Err() == nil {
		version, err := w.list(ctx)
		switch {
		case err == nil:
		case apierrors.IsNotFound(err):
			w.lost(ctx)
			pause = firstModelServerPause
			continue
		default:
			w.hear(ctx, "list", err)
			w.pause(ctx, pause)
			pause = min(2*pause, lastModelServerPause)
			continue
		}
		began := time.Now()
		w.watch(ctx, version)
		if time.Since(began) > lastModelServerPause {
			pause = firstModelServerPause
		}
		w.pause(ctx, pause)
		pause = min(2*pause, lastModelServerPause)
	}
}

// list replaces the objects by those that the server has now.
func (w *modelServerWatch) list(ctx context.Context) (version string, err error) {
	call, cancel := context.WithTimeout(ctx, modelServerListTimeout)
	defer cancel()
	list, err := w.client.List(call, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	w.missing = 0
	objects := make([]any, len(list.Items))
	for i := range list.Items {
		objects[i] = &list.Items[i]
	}
	return list.GetResourceVersion(), w.replace(ctx, objects, false)
}

// lost handles a server that says there is no such resource. If there was one before, lost believes only the second
// such response, since a server that has just started, or one of several, may not know its definitions yet.
func (w *modelServerWatch) lost(ctx context.Context) {
	w.missing++
	if w.table.isSynced() && w.missing == 1 {
		w.pause(ctx, w.confirm)
		return
	}
	_ = w.replace(ctx, nil, true) // cannot fail: there are no objects
	w.pause(ctx, w.absent)
}

// watch follows the objects from a version on, until the server or the connection ends it. Whether that was a fault,
// the next list shows.
func (w *modelServerWatch) watch(ctx context.Context, version string) {
	length := w.length + rand.N(w.length) //nolint:gosec // jitter, guards nothing
	call, cancel := context.WithTimeout(ctx, length+modelServerWatchGrace)
	defer cancel()
	seconds := int64(length.Seconds())
	events, err := w.client.Watch(call, metav1.ListOptions{ResourceVersion: version, TimeoutSeconds: &seconds})
	if apierrors.IsNotFound(err) {
		return
	}
	w.hear(ctx, "watch", err)
	if err != nil {
		return
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		switch event.Type {
		case watch.Added, watch.Modified:
			err = w.table.Update(event.Object)
		case watch.Deleted:
			err = w.table.Delete(event.Object)
		default: // an error, mostly because the version is too old
			return
		}
		if err != nil {
			return
		}
	}
}

// replace stores a whole list, which is empty without a definition.
func (w *modelServerWatch) replace(ctx context.Context, objects []any, without bool) error {
	w.hear(ctx, "list", nil)
	if w.without.Swap(without) != without {
		defer w.changed()
	}
	return w.table.Replace(objects, "")
}

// hear reports how a call ended, unless ctx has ended.
func (w *modelServerWatch) hear(ctx context.Context, verb string, err error) {
	if ctx.Err() == nil {
		w.troubles.hear(call{verb, w.resource, w.namespace}, err)
	}
}

// pause waits for half of d to d, at random.
func (w *modelServerWatch) pause(ctx context.Context, d time.Duration) {
	sleep(ctx, d/2+rand.N(d/2+1)) //nolint:gosec // jitter, guards nothing
}

// readModelServer keeps those parts of an object that say how to serve a model.
func readModelServer(from any) (ModelServer, bool) {
	o, ok := from.(*unstructured.Unstructured)
	if !ok {
		return ModelServer{}, false
	}
	object := map[string]any{
		"apiVersion": o.GetAPIVersion(),
		"kind":       o.GetKind(),
		"metadata":   map[string]any{"name": o.GetName(), "namespace": o.GetNamespace()},
	}
	if spec, ok := o.Object["spec"]; ok {
		object["spec"] = spec
	}
	raw, _ := json.Marshal(object) // cannot fail: it came from JSON
	return ModelServer{
		Group: o.GroupVersionKind().Group, Namespace: o.GetNamespace(), Name: o.GetName(), UID: string(o.GetUID()),
		Generation: o.GetGeneration(), ResourceVersion: o.GetResourceVersion(), Object: raw,
	}, true
}
