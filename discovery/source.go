// SPDX-License-Identifier: Apache-2.0

package discovery

import "context"

// Snapshot is everything a source (or a [Set]) knows at one moment. It is immutable once published.
type Snapshot struct {
	Version   uint64 // rises with every publication of one source or set
	Endpoints []Endpoint
}

// Source finds engines.
//
// Watch blocks until ctx ends and then returns nil or ctx's error. Meanwhile it calls publish with whole snapshots, and
// never from two goroutines at once:
//
//  1. It publishes the first one as soon as the source knows anything; that may be an empty list.
//  2. Versions rise strictly; IDs are unique within a snapshot.
//  3. An error of the source's own backend never empties the list: the last good snapshot stays.
//  4. If the source knows that an engine is going away, it publishes it as draining before it leaves it out.
//  5. publish is not called after Watch has returned.
//
// Any other return of Watch is a failure. The set then calls Watch again after a pause, and Watch begins again with a
// whole snapshot. Package discoverytest checks a source against all these rules.
type Source interface {
	Watch(ctx context.Context, publish func(Snapshot)) error
}

// SourceFunc is a function as a [Source].
type SourceFunc func(ctx context.Context, publish func(Snapshot)) error

// Watch calls f.
func (f SourceFunc) Watch(ctx context.Context, publish func(Snapshot)) error { return f(ctx, publish) }
