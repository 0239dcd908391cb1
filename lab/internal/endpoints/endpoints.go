// SPDX-License-Identifier: Apache-2.0

// Package endpoints is the discovery of programs that know their engines.
package endpoints

import (
	"context"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
)

// Run returns a running set with these engines, all of which it has. stop ends it.
func Run(ctx context.Context, all ...discovery.Endpoint) (set *discovery.Set, stop func(), err error) {
	source, err := static.New(all...)
	if err != nil {
		return nil, nil, err
	}
	set = discovery.NewSet(source)
	running, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = set.Run(running) // static sources do not fail
	}()
	stop = func() {
		cancel()
		<-ended
	}
	err = set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) == len(all) })
	if err != nil {
		stop()
	}
	return set, stop, err
}
