// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/pdkit/pdkit/discovery"
)

const (
	pace     = 20 * time.Millisecond // of publications, at most: a rollout is many events
	patience = 5 * time.Second       // with an API server that has worked
)

var errBusy = errors.New("kubernetes: the source is being watched already")

// Source publishes the engines of one namespace of one cluster, in the order of their IDs: CLUSTER/NAMESPACE/POD, or
// NAMESPACE/POD where Options.Cluster is empty, with /SERVICE/HOST:PORT for the pod in a slice that names none.
//
// A pod is draining from its deletion on (a slice's endpoint while it is terminating), ready when its condition Ready
// says so, and not ready else. It is not listed before it has an address, and after its end. A pod under the name of a
// removed one has its ID and another URL.
//
// The list comes when the API server has told all of it, and changes within milliseconds of an event. Whatever goes
// wrong with the API server leaves the list as it is: Watch goes on trying, with pauses of 0.4 s to 8 s, and
// Options.OnError is told.
type Source struct {
	opts    Options
	maker   *maker
	clients *clients
	pods    string // the label selector
	slices  string // the label selector
	busy    atomic.Bool

	patience time.Duration // the tests' is shorter

	// The rest belongs to the Watch that is under way, and outlives it.
	version uint64
	faults  faults
}

// New checks options and returns a source. It asks nothing before Watch.
func New(o *Options) (*Source, error) {
	if o == nil {
		o = &Options{}
	}
	s := &Source{opts: o.clone(), patience: patience}
	if err := s.opts.check(); err != nil {
		return nil, err
	}
	s.maker = newMaker(&s.opts)
	pods, err := s.opts.Selector.labels()
	if err != nil {
		return nil, err
	}
	s.pods = pods.String()
	if len(s.opts.Services) > 0 {
		names := make([]string, len(s.opts.Services))
		for i, service := range s.opts.Services {
			names[i] = service.Name
		}
		of, err := labels.NewRequirement(discoveryv1.LabelServiceName, selection.In, names)
		if err != nil {
			return nil, errors.New("kubernetes: Services: a name is too long")
		}
		s.slices = labels.NewSelector().Add(*of).String()
	}
	if s.clients, err = newClients(s.opts.Config); err != nil {
		return nil, fmt.Errorf("kubernetes: Config: %w", err)
	}
	return s, nil
}

// Watch publishes whenever the engines have changed, until ctx ends, and then returns nil. One Watch at a time: a
// second one returns an error at once, and there is no other error.
func (s *Source) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	if !s.busy.CompareAndSwap(false, true) {
		return errBusy
	}
	defer s.busy.Store(false)
	if ctx.Err() != nil {
		return nil
	}
	v := s.newView()
	inner, cancel := context.WithCancel(klog.NewContext(ctx, klog.Logger{})) // a logger that says nothing
	var wg sync.WaitGroup
	defer func() {
		cancel()
		wg.Wait()
		s.clients.closeIdle()
	}()
	for _, r := range v.reflectors {
		wg.Go(func() { r.RunWithContext(inner) })
	}
	var last []discovery.Endpoint
	for published := false; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-v.wake:
		}
		if !v.synced() {
			continue
		}
		list := s.maker.endpoints(v.stock(), &s.faults)
		if !published || !slices.EqualFunc(last, list, func(a, b discovery.Endpoint) bool {
			return sameEndpoint(&a, &b)
		}) {
			last, published = list, true
			v.troubles.published()
			s.version++
			publish(discovery.Snapshot{Version: s.version, Endpoints: list})
		}
		if err := s.faults.news(); err != nil {
			s.tell(err)
		}
		if !sleep(ctx, pace) {
			return nil
		}
	}
}

func (s *Source) tell(err error) {
	if s.opts.OnError != nil {
		s.opts.OnError(err)
	}
}

// view is what one Watch sees. Tables that are not needed are nil.
type view struct {
	pods   *table[*pod]
	slices *table[*slice]
	nodes  *table[string]

	troubles   *troubles
	reflectors []*cache.Reflector
	wake       chan struct{} // something has changed
}

func (s *Source) newView() *view {
	v := &view{wake: make(chan struct{}, 1)}
	v.troubles = &troubles{tell: s.tell, changed: v.change, patience: s.patience, calls: map[call]*trouble{},
		stays: s.version > 0}
	c, ns := s.clients, s.opts.Namespace
	if len(s.opts.Services) == 0 || s.maker.join {
		ask := c.askFor(c.core, "pods", ns, s.pods, func() runtime.Object { return &corev1.PodList{} })
		v.pods = &table[*pod]{convert: s.maker.pod, same: samePod, changed: v.change, listed: v.heardOf(ask)}
		v.reflect(ask, &corev1.Pod{}, v.pods)
	}
	if len(s.opts.Services) > 0 {
		ask := c.askFor(c.slices, "endpointslices", ns, s.slices,
			func() runtime.Object { return &discoveryv1.EndpointSliceList{} })
		v.slices = &table[*slice]{convert: s.maker.slice, same: sameSlice, changed: v.change, listed: v.heardOf(ask)}
		v.reflect(ask, &discoveryv1.EndpointSlice{}, v.slices)
	}
	if s.opts.Nodes {
		ask := c.askFor(c.core, "nodes", "", "", func() runtime.Object { return &metav1.PartialObjectMetadataList{} })
		v.nodes = &table[string]{convert: nodeZone, same: func(a, b string) bool { return a == b }, changed: v.change,
			listed: v.heardOf(ask)}
		v.reflect(ask, &metav1.PartialObjectMetadata{}, v.nodes)
	}
	return v
}

// heardOf ends the trouble with a list. The answer alone does not: a list may come as a stream, which may break.
func (v *view) heardOf(a asked) func() {
	return func() { v.troubles.hear(a.call("list"), nil) }
}

func (v *view) reflect(a asked, expected runtime.Object, store cache.ReflectorStore) {
	v.reflectors = append(v.reflectors, v.troubles.reflector(a, expected, store))
}

// synced reports whether all is known that the list is made of. Nodes only add to it: where they are refused, it comes
// without.
func (v *view) synced() bool {
	return (v.pods == nil || v.pods.isSynced()) && (v.slices == nil || v.slices.isSynced()) &&
		(v.nodes == nil || v.nodes.isSynced() || v.troubles.failing("nodes"))
}

func (v *view) stock() stock {
	return stock{pods: v.pods.snapshot(), slices: v.slices.snapshot(), nodes: v.nodes.snapshot()}
}

// change wakes the one that makes lists, who may have other things to do.
func (v *view) change() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// sleep waits for d and reports whether ctx still lives.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
