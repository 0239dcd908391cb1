// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// Set merges the snapshots of its sources into one, and marks endpoints that fail their health probes. All methods are
// safe for concurrent use.
//
// How sources merge:
//
//   - Endpoints keep their order: those of the first source, then those of the second, and so on.
//   - An ID belongs to the earliest source that lists it. That source's endpoint is taken whole, the later ones are
//     left out, so fields of two sources never mix. When the earlier source drops the ID, the later one's shows.
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

	// view is all that readers touch. A snapshot and the channel that announces its successor are swapped together, so
	// nobody can hold the channel of one version and miss the next.
	view atomic.Pointer[view]

	mu        sync.Mutex
	parts     []part
	base      []Endpoint           // the merged list, without the verdicts of health probes
	index     map[string]int       // ID to its place in base
	unhealthy map[string]struct{}  // IDs with a bad verdict, all of them in index
	probed    map[string]time.Time // when the last verdict came, by ID, all of them in index
}

// view is one published version.
type view struct {
	snap    *Snapshot
	changed chan struct{} // closed when the next version is published
}

// part is the state of one source.
type part struct {
	known     bool
	endpoints []Endpoint
	faults    string // of its endpoints, as reported last
}

// NewSet returns a set over sources. Earlier sources win over later ones. The set is empty until Run gets a first
// snapshot.
func NewSet(sources ...Source) *Set {
	s := &Set{
		sources:   append([]Source(nil), sources...),
		parts:     make([]part, len(sources)),
		index:     map[string]int{},
		unhealthy: map[string]struct{}{},
		probed:    map[string]time.Time{},
	}
	s.view.Store(&view{snap: &Snapshot{}, changed: make(chan struct{})})
	return s
}

// OnError sets a function that is called for every failure of a source and, once per change, for endpoints of a source
// that were left out. The error is a *[SourceError]. Call OnError before Run. Several goroutines may call fn at once,
// and the source concerned waits until fn returns.
func (s *Set) OnError(fn func(error)) { s.onError = fn }

// Load returns the current snapshot, never nil. It returns the same pointer until the next version is published, so
// callers may keep what they derive from a snapshot by its pointer. Version 0 means that no source has published yet.
func (s *Set) Load() *Snapshot { return s.view.Load().snap }

// Changed returns a channel that is closed when there is a newer snapshot than at the time of the call. To miss no
// update, take the channel first and load afterwards: Load then returns the snapshot that the channel belongs to, or a
// newer one whose channel is closed already or about to be.
//
//	for {
//		changed := set.Changed()
//		if good(set.Load()) {
//			break
//		}
//		<-changed
//	}
func (s *Set) Changed() <-chan struct{} { return s.view.Load().changed }

// WaitReady returns nil as soon as ok holds for the current snapshot, or ctx's error. It calls ok in the calling
// goroutine, for the current snapshot and then for newer ones; it may skip versions.
func (s *Set) WaitReady(ctx context.Context, ok func(*Snapshot) bool) error {
	for snap := range s.Changes(ctx) {
		if ok(snap) {
			return nil
		}
	}
	return ctx.Err()
}

// Changes returns the current snapshot, then each newer one as it is published, until ctx ends. A slow reader skips
// versions and gets the latest.
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

// SetHealthy records the verdict of a health probe. If healthy is false, an endpoint that its source calls ready is not
// ready in the next snapshot; other phases stay. A verdict that changes nothing publishes nothing. The set forgets the
// verdict when the endpoint leaves the set or gets another URL, and ignores one for an unknown ID.
func (s *Set) SetHealthy(id string, healthy bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, listed := s.index[id]
	if !listed {
		return
	}
	s.probed[id] = time.Now()
	if _, marked := s.unhealthy[id]; marked == !healthy {
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

// Healthy returns the last verdict of [Set.SetHealthy] about an endpoint, and when it came: the zero time if there is
// none.
func (s *Set) Healthy(id string) (healthy bool, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at = s.probed[id]
	_, marked := s.unhealthy[id]
	return !marked && !at.IsZero(), at
}

// replace stores a source's new snapshot. The set publishes if the snapshot differs from the last one, or is the first.
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

// publish makes the next version of base with the verdicts. The caller holds s.mu.
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
