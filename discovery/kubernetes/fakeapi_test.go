// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// fakeAPI is as much of an API server as lists and watches need: one namespace, all versions kept until it is told to
// forget. What it cannot be told to do, the tests with a real one do.
type fakeAPI struct {
	server *httptest.Server

	mu       sync.Mutex
	events   []fakeEvent
	oldest   int // versions before this are forgotten
	changed  chan struct{}
	cut      chan struct{} // closed to end all watches
	refuse   func(verb, resource string) int
	noStream bool           // an older server, which does not stream lists
	calls    map[string]int // by verb and resource
}

// fakeEvent is the fate of one object at one version, which is the event's place in the history, from 1.
type fakeEvent struct {
	resource string
	was, is  metav1.Object
}

func newFakeAPI(t testing.TB) *fakeAPI {
	f := &fakeAPI{changed: make(chan struct{}), cut: make(chan struct{}), calls: map[string]int{}}
	f.server = httptest.NewServer(f)
	t.Cleanup(func() {
		f.server.CloseClientConnections()
		f.server.Close()
	})
	return f
}

func (f *fakeAPI) config() *rest.Config { return &rest.Config{Host: f.server.URL} }

func resourceOf(o metav1.Object) string {
	switch o.(type) {
	case *corev1.Pod:
		return "pods"
	case *discoveryv1.EndpointSlice:
		return "endpointslices"
	default:
		return "nodes"
	}
}

// put creates or changes objects, remove deletes one.
func (f *fakeAPI) put(objects ...metav1.Object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, o := range objects {
		f.add(fakeEvent{resource: resourceOf(o), is: o})
	}
}

func (f *fakeAPI) remove(o metav1.Object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.add(fakeEvent{resource: resourceOf(o), was: o})
}

// add keeps a copy of the object: what watches send must not change.
func (f *fakeAPI) add(e fakeEvent) {
	copied := func(o metav1.Object) metav1.Object {
		if o == nil {
			return nil
		}
		o = typed(o.(runtime.Object).DeepCopyObject()).(metav1.Object)
		o.SetResourceVersion(strconv.Itoa(len(f.events) + 1))
		return o
	}
	e.is, e.was = copied(e.is), copied(e.was)
	for _, was := range slices.Backward(f.events) {
		if e.is != nil && was.resource == e.resource && was.is != nil && was.is.GetName() == e.is.GetName() {
			e.was = was.is
			break
		}
	}
	f.events = append(f.events, e)
	close(f.changed)
	f.changed = make(chan struct{})
}

// endWatches has the server close all watches, and with forget answer 410 to those that begin before now.
func (f *fakeAPI) endWatches(forget bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if forget {
		f.oldest = len(f.events)
	}
	close(f.cut)
	f.cut = make(chan struct{})
}

// refusing sets what response each call gets: 0 for the right one, -1 for a broken connection, -2 for one that breaks
// after a second.
func (f *fakeAPI) refusing(status func(verb, resource string) int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuse = status
}

func (f *fakeAPI) count(call string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[call]
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, q := path.Base(r.URL.Path), r.URL.Query()
	verb := "list"
	if q.Get("watch") != "" {
		verb = "watch"
	}
	selector, err := labels.Parse(q.Get("labelSelector"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	f.mu.Lock()
	f.calls[verb+" "+resource]++
	status, cut := 0, f.cut // endWatches ends all that were not refused before it
	if f.refuse != nil {
		status = f.refuse(verb, resource)
	}
	if f.noStream && q.Get("sendInitialEvents") != "" {
		status = http.StatusUnprocessableEntity
	}
	f.mu.Unlock()
	if status < -1 {
		time.Sleep(1100 * time.Millisecond)
	}
	switch {
	case status < 0:
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
		}
	case status == http.StatusOK:
		http.Error(w, "<html>", status)
	case status > 0:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		writeJSON(
			w, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure",
				Code: int32(status), Reason: reasons[status], Message: "secret"},
		)
	case verb == "watch":
		f.watch(w, r, resource, selector, cut)
	default:
		f.list(w, resource, selector)
	}
}

var reasons = map[int]metav1.StatusReason{403: metav1.StatusReasonForbidden, 401: metav1.StatusReasonUnauthorized,
	410: metav1.StatusReasonExpired}

func writeJSON(w http.ResponseWriter, v any) {
	_ = json.NewEncoder(w).Encode(v)
	_ = http.NewResponseController(w).Flush()
}

// now returns the objects, and their version.
func (f *fakeAPI) now(resource string, selector labels.Selector) (objects []metav1.Object, version int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at := map[string]metav1.Object{}
	for _, e := range f.events {
		switch {
		case e.resource != resource:
		case e.is != nil:
			at[e.is.GetName()] = e.is
		default:
			delete(at, e.was.GetName())
		}
	}
	for _, o := range at {
		if selector.Matches(labels.Set(o.GetLabels())) {
			objects = append(objects, o)
		}
	}
	return objects, len(f.events)
}

func (f *fakeAPI) list(w http.ResponseWriter, resource string, selector labels.Selector) {
	objects, version := f.now(resource, selector)
	kind := map[string][2]string{"pods": {"v1", "PodList"},
		"endpointslices": {"discovery.k8s.io/v1", "EndpointSliceList"},
		"nodes":          {"meta.k8s.io/v1", "PartialObjectMetadataList"}}[resource]
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, map[string]any{
		"apiVersion": kind[0], "kind": kind[1], "metadata": map[string]string{"resourceVersion": strconv.Itoa(version)},
		"items": append([]metav1.Object{}, objects...),
	})
}

func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, resource string, selector labels.Selector,
	cut <-chan struct{}) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	send := func(kind watch.EventType, o any) { writeJSON(w, map[string]any{"type": kind, "object": o}) }
	from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		objects, version := f.now(resource, selector)
		for _, o := range objects {
			send(watch.Added, o)
		}
		send(watch.Bookmark, bookmark(resource, version))
		from = version
	}
	for {
		f.mu.Lock()
		changed, oldest, news := f.changed, f.oldest, f.events[min(from, len(f.events)):]
		f.mu.Unlock()
		if from < oldest {
			send(
				watch.Error, &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
					Status: "Failure", Code: 410, Reason: metav1.StatusReasonExpired},
			)
			return
		}
		for _, e := range news {
			from++
			if e.resource != resource {
				continue
			}
			had := e.was != nil && selector.Matches(labels.Set(e.was.GetLabels()))
			has := e.is != nil && selector.Matches(labels.Set(e.is.GetLabels()))
			switch {
			case has && had:
				send(watch.Modified, e.is)
			case has:
				send(watch.Added, e.is)
			case had:
				send(watch.Deleted, e.was)
			}
		}
		select {
		case <-r.Context().Done():
			return
		case <-cut:
			return
		case <-changed:
		}
	}
}

// typed fills in what objects of Go's types leave out.
func typed(o any) any {
	switch o := o.(type) {
	case *corev1.Pod:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	case *discoveryv1.EndpointSlice:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
	case *metav1.PartialObjectMetadata:
		o.TypeMeta = metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"}
	}
	return o
}

// bookmark ends the stream of a first list.
func bookmark(resource string, version int) any {
	m := metav1.ObjectMeta{ResourceVersion: strconv.Itoa(version),
		Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}
	switch resource {
	case "pods":
		return typed(&corev1.Pod{ObjectMeta: m})
	case "endpointslices":
		return typed(&discoveryv1.EndpointSlice{ObjectMeta: m})
	default:
		return typed(&metav1.PartialObjectMetadata{ObjectMeta: m})
	}
}
