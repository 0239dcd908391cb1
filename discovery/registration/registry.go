// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// farewell is how long an engine that was not draining is published as draining before it leaves, so that every watcher
// sees it.
const farewell = time.Second

// registry holds the announced engines. It has no goroutine: each call first removes what has expired.
type registry struct {
	expiry time.Duration
	max    int

	mu      sync.Mutex
	entries map[string]*entry // by endpoint ID
	byURL   map[string]string // sameEngine to ID, of entries that are not leaving
	byZMQ   map[string]string // zmq_address to ID, of entries kept by ZeroMQ messages
	due     time.Time         // no entry's until is earlier; zero: no entry expires
	snap    discovery.Snapshot
	stale   bool          // the entries have changed since snap was made
	changed chan struct{} // closed at the next change
	counts  Counts
}

// entry is one engine.
type entry struct {
	endpoint discovery.Endpoint
	pinged   bool      // kept by ZeroMQ messages, not by a lease
	zmq      string    // zmq_address, if its messages have one
	owner    peer      // the connection that announced it by ZeroMQ
	heard    time.Time // the owner's last message
	lease    time.Duration
	until    time.Time // the end of the lease, or of the farewell
	leaving  bool      // only snapshots still show it
}

func newRegistry(expiry time.Duration, most int) *registry {
	return &registry{
		expiry: expiry, max: most, snap: discovery.Snapshot{Version: 1},
		entries: map[string]*entry{}, byURL: map[string]string{}, byZMQ: map[string]string{},
		changed: make(chan struct{}),
	}
}

// verdict is the outcome of a request to the registry.
type verdict int

const (
	done     verdict = iota
	created          // done; the engine is new
	unknown          // no such engine
	conflict         // another announcement prevents it
	full             // too many engines
)

// view returns the current snapshot, which never changes, the earliest time at which the next one may be due by expiry
// (zero: none), and a channel that is closed at any earlier change.
func (r *registry) view() (snap discovery.Snapshot, due time.Time, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sweep(time.Now())
	if r.stale {
		r.stale = false
		r.snap = discovery.Snapshot{Version: r.snap.Version + 1,
			Endpoints: make([]discovery.Endpoint, 0, len(r.entries))}
		for _, id := range slices.Sorted(maps.Keys(r.entries)) {
			r.snap.Endpoints = append(r.snap.Endpoints, r.entries[id].endpoint)
		}
	}
	return r.snap, r.due, r.changed
}

// change wakes watchers. The caller holds r.mu.
func (r *registry) change() {
	r.stale = true
	close(r.changed)
	r.changed = make(chan struct{})
}

// expect records that an entry expires at until. The caller holds r.mu.
func (r *registry) expect(until time.Time) {
	if r.due.IsZero() || until.Before(r.due) {
		r.due = until
	}
}

// sweep removes what has expired. Before r.due it looks at no entry, since it runs with each message. The caller holds
// r.mu.
func (r *registry) sweep(now time.Time) {
	if r.due.IsZero() || r.due.After(now) {
		return
	}
	r.due = time.Time{}
	changed := false
	for id, e := range r.entries {
		if e.until.After(now) {
			r.expect(e.until)
			continue
		}
		changed = true
		if e.leaving || e.endpoint.Phase == discovery.PhaseDraining {
			r.drop(id)
		} else {
			r.leave(e, now)
		}
	}
	if changed {
		r.change()
	}
}

// leave starts an engine's farewell. The caller holds r.mu and calls change.
func (r *registry) leave(e *entry, now time.Time) {
	r.forget(e)
	e.leaving, e.until = true, now.Add(farewell)
	e.endpoint.Phase = discovery.PhaseDraining
	r.expect(e.until)
}

// drop removes an engine from the list. The caller holds r.mu and calls change.
func (r *registry) drop(id string) {
	if e := r.entries[id]; e != nil {
		r.forget(e)
		delete(r.entries, id)
	}
}

// forget removes an entry from the indexes.
func (r *registry) forget(e *entry) {
	if key := sameEngine(e.endpoint.URL); r.byURL[key] == e.endpoint.ID {
		delete(r.byURL, key)
	}
	if r.byZMQ[e.zmq] == e.endpoint.ID {
		delete(r.byZMQ, e.zmq)
	}
}

// put stores an entry under its ID. The caller holds r.mu and calls change.
func (r *registry) put(e *entry) {
	id := e.endpoint.ID
	r.drop(id)
	r.entries[id] = e
	r.expect(e.until)
	r.byURL[sameEngine(e.endpoint.URL)] = id
	if e.zmq != "" {
		r.byZMQ[e.zmq] = id
	}
}

// prune removes the IDs that are no longer on the list.
func (r *registry) prune(ids map[string]struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(ids, func(id string, _ struct{}) bool { return r.entries[id] == nil })
}

// known returns an entry that is not leaving, or nil.
func (r *registry) known(id string) *entry {
	if e := r.entries[id]; e != nil && !e.leaving {
		return e
	}
	return nil
}

// register handles a registration by HTTP.
func (r *registry) register(e discovery.Endpoint, lease time.Duration) verdict {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.sweep(now)
	other := r.byURL[sameEngine(e.URL)]
	if other != "" && other != e.ID {
		switch o := r.entries[other]; {
		case o.pinged, o.endpoint.Phase == discovery.PhaseDraining: // the same engine under a new ID
		default:
			return conflict
		}
	} else {
		other = ""
	}
	old := r.known(e.ID)
	if r.entries[e.ID] == nil && other == "" && len(r.entries) >= r.max {
		return full
	}
	r.drop(other)
	r.put(&entry{endpoint: e, lease: lease, until: now.Add(lease)})
	if old == nil || old.pinged || !equal(&old.endpoint, &e) {
		r.change()
	}
	if old == nil {
		return created
	}
	return done
}

// renew restarts an HTTP lease and returns its length.
func (r *registry) renew(id string) (time.Duration, verdict) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.sweep(now)
	e := r.known(id)
	if e == nil || e.pinged {
		return 0, unknown
	}
	e.until = now.Add(e.lease)
	return e.lease, done
}

// drain stops new requests to an engine.
func (r *registry) drain(id string) verdict {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sweep(time.Now())
	e := r.known(id)
	if e == nil {
		return unknown
	}
	if e.endpoint.Phase != discovery.PhaseDraining {
		e.endpoint.Phase = discovery.PhaseDraining
		r.change()
	}
	return done
}

// remove removes an engine that was registered by HTTP.
func (r *registry) remove(id string) verdict {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.sweep(now)
	switch e := r.known(id); {
	case e == nil:
		return unknown
	case e.pinged:
		return conflict
	case e.endpoint.Phase == discovery.PhaseDraining:
		r.drop(id)
	default:
		r.leave(e, now)
	}
	r.change()
	return done
}

// listed is an engine as GET /v1/endpoints shows it.
type listed struct {
	discovery.Endpoint
	pinged bool
	left   time.Duration
}

func (r *registry) list() []listed {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.sweep(now)
	all := make([]listed, 0, len(r.entries))
	for _, id := range slices.Sorted(maps.Keys(r.entries)) {
		if e := r.known(id); e != nil {
			all = append(all, listed{e.endpoint, e.pinged, e.until.Sub(now)})
		}
	}
	return all
}

// peer is a connection that announces engines: a channel that is closed when the connection has ended.
type peer <-chan struct{}

// speaksFor reports whether a peer may change what is known about an engine. The engine's owner may. Another peer may
// only if the owner's connection has ended or has not announced the engine for the expiry time. Otherwise each peer
// could turn other engines away, or lead requests elsewhere.
func (r *registry) speaksFor(from peer, e *entry, now time.Time) bool {
	select {
	case <-e.owner:
		return true
	default:
		return e.owner == from || now.Sub(e.heard) > r.expiry
	}
}

// ping handles an announcement by ZeroMQ.
func (r *registry) ping(p *announcement, from peer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.hello {
		r.counts.Hellos++
		return
	}
	now := time.Now()
	r.sweep(now)
	e := p.endpoint
	old := r.known(e.ID)
	if old != nil && !old.pinged || old == nil && r.byURL[sameEngine(e.URL)] != "" {
		r.counts.Held++
		return
	}
	if old != nil && old.endpoint.Phase == discovery.PhaseDraining {
		e.Phase = discovery.PhaseDraining // an operator has drained it
	}
	same := old != nil && equal(&old.endpoint, &e) && old.zmq == p.zmq
	moved := r.entries[r.byZMQ[p.zmq]] // the same engine under its old address
	if moved == old {
		moved = nil
	}
	if old != nil && !same && !r.speaksFor(from, old, now) || moved != nil && !r.speaksFor(from, moved, now) {
		r.counts.Held++
		return
	}
	if r.entries[e.ID] == nil && len(r.entries) >= r.max {
		r.counts.Surplus++
		return
	}
	r.counts.Pings++
	if moved != nil {
		r.leave(moved, now)
	}
	if !same {
		r.put(&entry{endpoint: e, pinged: true, zmq: p.zmq, owner: from, heard: now, until: now.Add(r.expiry)})
	} else {
		if r.speaksFor(from, old, now) {
			old.owner, old.heard = from, now
		}
		old.until = now.Add(r.expiry)
	}
	if !same || moved != nil {
		r.change()
	}
}

func (r *registry) count(into func(*Counts) *int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*into(&r.counts)++
}

// equal compares everything that an announcement can say.
func equal(a, b *discovery.Endpoint) bool {
	return a.ID == b.ID && a.URL.String() == b.URL.String() && a.Role == b.Role && a.Phase == b.Phase &&
		a.Group == b.Group &&
		a.Zone == b.Zone && a.Model == b.Model && a.Version == b.Version && maps.Equal(a.Attributes, b.Attributes)
}

// sameEngine returns equal texts for URLs that lead to the same engine.
func sameEngine(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port) + u.Path
}
