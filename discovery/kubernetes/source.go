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
	pace     = 20 * time.Millisecond // between two publications, at least, since a rollout is many events
	patience = 5 * time.Second       // before a fault of an API server that has worked is reported
)

var errBusy = errors.New("kubernetes: the source is being watched already")

// Source publishes the engines of one namespace of one cluster, sorted by ID. An ID is CLUSTER/NAMESPACE/POD, or
// NAMESPACE/POD if Options.Cluster is empty; for an entry of a slice that names no pod, it has /SERVICE/HOST:PORT in
// place of /POD. Where a pod has a port for each rank, :PORT follows.
//
// A pod is draining from its deletion on (an entry of a slice while it is terminating), ready if its condition Ready is
// true, else not ready. It is listed from when it has an address until it ends. A new pod with the name of a removed
// one has the same ID and another URL.
//
// The source publishes its first list when the API server has sent all of it, and later lists within milliseconds of an
// event. A fault of the API server never changes the list: Watch repeats its calls, with pauses of 0.4 s to 8 s, and
// calls Options.OnError.
type Source struct {
	opts    Options
	maker   *maker
	clients *clients
	pods    string // the label selector
	slices  string // the label selector
	busy    atomic.Bool

	patience time.Duration // shorter in tests

	// The following fields belong to the running Watch, and keep their values for the next.
	version uint64
	faults  faults
}

// New checks the options and returns a source. It asks nothing before Watch.
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

// Watch publishes a list whenever the engines have changed, until ctx ends, and then returns nil. Only one Watch may
// run at a time; a second one returns an error at once. There are no other errors.
func (s *Source) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	if !s.busy.CompareAndSwap(false, true) {
		return errBusy
	}
	defer s.busy.Store(false)
	if ctx.Err() != nil {
		return nil
	}
	v := s.newView()
	inner, cancel := context.WithCancel(klog.NewContext(ctx, klog.Logger{})) // a logger without output
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

// view is the state of one Watch. Tables that are not needed are nil.
type view struct {
	pods   *table[*pod]
	slices *table[*slice]
	nodes  *table[string]

	troubles   *troubles
	reflectors []*cache.Reflector
	wake       waker
}

func (s *Source) newView() *view {
	v := &view{wake: make(waker, 1)}
	v.troubles = &troubles{tell: s.tell, changed: v.wake.up, patience: s.patience, calls: map[call]*trouble{},
		stays: s.version > 0}
	c, ns := s.clients, s.opts.Namespace
	if len(s.opts.Services) == 0 || s.maker.join {
		ask := c.askFor(c.core, "pods", ns, s.pods, func() runtime.Object { return &corev1.PodList{} })
		v.pods = follow(v, ask, &corev1.Pod{}, s.maker.podTable)
	}
	if len(s.opts.Services) > 0 {
		ask := c.askFor(c.slices, "endpointslices", ns, s.slices,
			func() runtime.Object { return &discoveryv1.EndpointSliceList{} })
		v.slices = follow(v, ask, &discoveryv1.EndpointSlice{}, s.maker.sliceTable)
	}
	if s.opts.Nodes {
		ask := c.askFor(c.core, "nodes", "", "", func() runtime.Object { return &metav1.PartialObjectMetadataList{} })
		v.nodes = follow(v, ask, &metav1.PartialObjectMetadata{}, zoneTable)
	}
	return v
}

// follow makes the table of a resource, and the reflector that fills it. The whole list ends the fault of a list: the
// response alone does not, since a list may come as a stream, which may break.
func follow[V any](v *view, a asked, expected runtime.Object, newTable func(changed, listed func()) *table[V],
) *table[V] {
	t := newTable(v.wake.up, func() { v.troubles.hear(a.call("list"), nil) })
	v.reflectors = append(v.reflectors, v.troubles.reflector(a, expected, t))
	return t
}

// synced reports whether everything needed for a list is known. Nodes are not needed: if they are refused, the list
// comes without their zones.
func (v *view) synced() bool {
	return (v.pods == nil || v.pods.isSynced()) && (v.slices == nil || v.slices.isSynced()) &&
		(v.nodes == nil || v.nodes.isSynced() || v.troubles.failing("nodes"))
}

func (v *view) stock() stock {
	return stock{pods: v.pods.snapshot(), slices: v.slices.snapshot(), nodes: v.nodes.snapshot()}
}

// waker is a channel of one element, from which a goroutine learns that something has changed.
type waker chan struct{}

func (w waker) up() {
	select {
	case w <- struct{}{}:
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
