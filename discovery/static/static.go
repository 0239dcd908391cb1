// SPDX-License-Identifier: Apache-2.0

// Package static is a discovery source for endpoints that are known at the start of the program and never change.
package static

import (
	"context"
	"fmt"
	"maps"
	"net/url"

	"github.com/pdkit/pdkit/discovery"
)

// Source publishes one list. Any number of sets may watch it at once.
type Source struct {
	endpoints []discovery.Endpoint
}

// New returns a source of endpoints, in their order. An endpoint without an ID gets its URL's host, port and path as
// its ID. New refuses what [discovery.Endpoint.Validate] refuses, and two endpoints with one ID; an engine that serves
// prefill and decode under one URL is one endpoint of role both. The list may be empty.
//
// New copies the endpoints, their URLs and attributes.
func New(endpoints ...discovery.Endpoint) (*Source, error) {
	s := &Source{endpoints: make([]discovery.Endpoint, 0, len(endpoints))}
	first := make(map[string]int, len(endpoints))
	for i, e := range endpoints {
		e.Attributes = maps.Clone(e.Attributes)
		if e.URL != nil {
			e.URL = new(url.URL)
			*e.URL = *endpoints[i].URL
			if e.ID == "" {
				e.ID = e.URL.Host + e.URL.Path
			}
		}
		if err := e.Validate(); err != nil {
			return nil, fmt.Errorf("endpoint %d: %w", i, err)
		}
		if j, taken := first[e.ID]; taken {
			return nil, fmt.Errorf("endpoint %d: ID %q is endpoint %d's already (one engine for prefill and decode "+
				"has the role both)", i, e.ID, j)
		}
		first[e.ID] = i
		s.endpoints = append(s.endpoints, e)
	}
	return s, nil
}

// Watch publishes the list once and waits for the end of ctx.
func (s *Source) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	publish(discovery.Snapshot{Version: 1, Endpoints: s.endpoints})
	<-ctx.Done()
	return nil
}

// NewSet returns a set of these endpoints, in their order. It has them already, so nobody needs to run it. NewSet
// refuses what [New] refuses.
func NewSet(endpoints ...discovery.Endpoint) (*discovery.Set, error) {
	source, err := New(endpoints...)
	if err != nil {
		return nil, err
	}
	// A set keeps what it knows when Run has ended.
	ctx, listed := context.WithCancel(context.Background())
	defer listed()
	set := discovery.NewSet(discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
		return source.Watch(ctx, func(s discovery.Snapshot) {
			publish(s)
			listed()
		})
	}))
	return set, set.Run(ctx)
}
