// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"iter"
	"sync"
	"sync/atomic"
)

// Set merges the snapshots of its sources into one and lays the verdicts of health probes over it. All methods may be
// called by any number of goroutines at once.
//
// How sources merge:
//
//   - Endpoints keep their order: those of the first source, then those of the second, and so on.
//   - An ID belongs to the earliest source that lists it. That source's endpoint is taken whole, the later ones are
//     left out: fields of two sources never mix. When the earlier source drops the ID, the later one's endpoint shows.
//   - The ID alone is the identity. Two IDs with one URL are two endpoints, for example an engine that one source
//     lists for prefill and another for decode.
//   - Within one snapshot of one source the first endpoint of an ID stays. Later ones, and endpoints that
//     [Endpoint.Validate] refuses, are left out and reported to OnError.
//   - A snapshot replaces its source's last one as a whole, so a changed role or address takes effect at once.
//   - A source that has failed keeps its last snapshot in the set.
type Set struct {
	sources []Source
	running atomic.Bool
	onError func(error)

	// view is all that readers touch. A snapshot and the channel that tells of its successor are swapped as one, so
	// nobody can hold the channel of one version and miss the next.
	view atomic.Pointer[view]

	mu        sync.Mutex
	parts     []part
	base      []Endpoint          // the merge before the overlay of probes
	index     map[string]int      // ID to its place in base
	unhealthy map[string]struct{} // IDs, all of them in index
}

// view is one published version.
type view struct {
	snap    *Snapshot
	changed chan struct{} // closed when the next version is published
}

// part is what the set holds of one source.
type part struct {
	known     bool
	endpoints []Endpoint
	faults    string // of endpoints, as last reported
}

// NewSet returns a set over sources, the earlier of which win over the later. It is empty until Run has heard from one.
func NewSet(sources ...Source) *Set {
	s := &Set{
		sources:   append([]Source(nil), sources...),
		parts:     make([]part, len(sources)),
		index:     map[string]int{},
		unhealthy: map[string]struct{}{},
	}
	s.view.Store(&view{snap: &Snapshot{}, changed: make(chan struct{})})
	return s
}

// OnError has fn called for every failure of a source and, once per change, for the endpoints of a source that were
// left out. The error is a *[SourceError]. OnError is called before Run; fn is called from several goroutines, and the
// source it tells of waits for it.
func (s *Set) OnError(fn func(error)) { s.onError = fn }

// Load returns the current snapshot: never nil, the same pointer until the next version is published, so whatever is
// derived from a snapshot may be kept under its pointer. Version 0 means that no source has published yet.
func (s *Set) Load() *Snapshot { return s.view.Load().snap }

// Changed returns a channel that is closed once there is a snapshot newer than the one that was current when Changed
// was called. Who takes the channel first and loads afterwards loses no update: what Load returns is either the
// snapshot the channel belongs to, or a newer one, and then the channel is closed already or about to be.
//
//	for {
//		changed := set.Changed()
//		if good(set.Load()) {
//			break
//		}
//		<-changed
//	}
func (s *Set) Changed() <-chan struct{} { return s.view.Load().changed }

// WaitReady returns nil as soon as ok holds for the current snapshot, or ctx's error. It calls ok from the calling
// goroutine, once for the current snapshot and once for each newer one that it gets to see.
func (s *Set) WaitReady(ctx context.Context, ok func(*Snapshot) bool) error {
	for snap := range s.Changes(ctx) {
		if ok(snap) {
			return nil
		}
	}
	return ctx.Err()
}

// Changes returns the current snapshot, then each newer one as it is published, until ctx ends. The latest wins: a
// reader that takes longer than a version lives sees the next one when it comes back, with versions left out.
func (s *Set) Changes(ctx context.Context) iter.Seq[*Snapshot] {
	return func(yield func(*Snapshot) bool) {
		for {
			v := s.view.Load()
			if ctx.Err() != nil || !yield(v.snap) {
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-v.changed:
			}
		}
	}
}

// SetHealthy lays a probe's verdict over the endpoint id: an unhealthy endpoint that its source calls ready is not
// ready in the next snapshot; other phases stay as the source says. A verdict that changes nothing publishes nothing.
// It is forgotten when the endpoint leaves the set or gets another URL, and refused for an ID that is not in it.
func (s *Set) SetHealthy(id string, healthy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, listed := s.index[id]
	_, marked := s.unhealthy[id]
	if !listed || marked == !healthy {
		return
	}
	if healthy {
		delete(s.unhealthy, id)
	} else {
		s.unhealthy[id] = struct{}{}
	}
	if s.base[i].Phase == PhaseReady {
		s.publish()
	}
}

// replace takes a source's new snapshot. The set publishes when it differs from the last, or is the source's first.
func (s *Set) replace(source int, endpoints []Endpoint) {
	fault := s.replaceLocked(source, endpoints)
	if fault != nil {
		s.report(source, fault)
	}
}

func (s *Set) replaceLocked(source int, endpoints []Endpoint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.parts[source]
	if p.known && sameList(p.endpoints, endpoints) {
		return nil
	}
	p.known, p.endpoints = true, endpoints
	faults := s.merge(source)
	s.publish()
	if faults == p.faults {
		return nil
	}
	p.faults = faults
	if faults == "" {
		return nil
	}
	return errors.New(faults)
}

// publish makes the next version of base and the overlay. s.mu is held.
func (s *Set) publish() {
	endpoints := s.base
	if len(s.unhealthy) > 0 {
		endpoints = append([]Endpoint(nil), s.base...)
		for id := range s.unhealthy {
			if e := &endpoints[s.index[id]]; e.Phase == PhaseReady {
				e.Phase = PhaseNotReady
			}
		}
	}
	old := s.view.Load()
	s.view.Store(&view{
		snap:    &Snapshot{Version: old.snap.Version + 1, Endpoints: endpoints},
		changed: make(chan struct{}),
	})
	close(old.changed)
}
