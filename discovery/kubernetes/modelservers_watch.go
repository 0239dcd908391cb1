// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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

// modelServerReport is the state of one group's watch.
type modelServerReport struct {
	index   int
	known   bool // false only in the zero report
	absent  bool // the definition is not installed
	list    []ModelServer
	changed bool // an object appeared, disappeared, or has another spec
}

// modelServerWatch keeps the objects of one group. It lists them and watches for changes; when the watch has ended, for
// whatever reason, it lists them again. The objects are few, and a new list is correct whatever happened meanwhile.
type modelServerWatch struct {
	*ModelServers
	index    int
	resource string // its name in errors
	client   dynamic.ResourceInterface
	reports  chan<- modelServerReport
	troubles *troubles

	known    bool // a first report has been sent
	isAbsent bool
	missing  int                    // how many looks in a row found no definition
	objects  map[string]ModelServer // by name; a stored object never changes
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
	w.hear(ctx, "list", nil)
	objects := make(map[string]ModelServer, len(list.Items))
	for i := range list.Items {
		s := w.read(&list.Items[i])
		objects[s.Name] = s
	}
	w.replace(ctx, objects, false)
	return list.GetResourceVersion(), nil
}

// lost handles a server that says there is no such resource. If there was one before, lost believes only the second
// such response, since a server that has just started, or one of several, may not know its definitions yet.
func (w *modelServerWatch) lost(ctx context.Context) {
	w.missing++
	if w.known && w.missing == 1 {
		w.pause(ctx, w.confirm)
		return
	}
	w.hear(ctx, "list", nil)
	w.replace(ctx, nil, true)
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
		object, ok := event.Object.(*unstructured.Unstructured)
		if !ok {
			return
		}
		s := w.read(object)
		objects := maps.Clone(w.objects) // a reported map is never changed
		switch event.Type {
		case watch.Added, watch.Modified:
			objects[s.Name] = s
		case watch.Deleted:
			delete(objects, s.Name)
		default: // an error, mostly because the version is too old
			return
		}
		w.replace(ctx, objects, false)
	}
}

// replace stores the objects. It sends a report if a spec is new, or if the definition was installed or removed.
func (w *modelServerWatch) replace(ctx context.Context, objects map[string]ModelServer, absent bool) {
	same := func(a, b ModelServer) bool { return a.UID == b.UID && bytes.Equal(a.Object, b.Object) }
	r := modelServerReport{index: w.index, known: true, absent: absent,
		changed: !maps.EqualFunc(w.objects, objects, same)}
	if w.known && w.isAbsent == absent && !r.changed {
		return
	}
	w.known, w.isAbsent, w.objects = true, absent, objects
	r.list = slices.Collect(maps.Values(objects))
	select {
	case <-ctx.Done():
	case w.reports <- r:
	}
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

// read keeps those parts of an object that say how to serve a model.
func (w *modelServerWatch) read(o *unstructured.Unstructured) ModelServer {
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
	}
}
