// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// After a failure Run pauses before it watches the source again. The pause doubles from firstPause to lastPause. It
// starts again with firstPause after a watch that lived longer than lastPause.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 10 * time.Second
)

// SourceError is a failure of one source of a [Set].
type SourceError struct {
	Source int // its index in NewSet's arguments
	Err    error
}

// Error names the source by its index.
func (e *SourceError) Error() string { return fmt.Sprintf("discovery source %d: %v", e.Source, e.Err) }

// Unwrap returns Err.
func (e *SourceError) Unwrap() error { return e.Err }

var (
	errRunning = errors.New("discovery: the set is running already")
	errEnded   = errors.New("ended before its context")
	errLate    = errors.New("published after its Watch had returned; ignored")
)

// Run watches all sources until ctx ends, waits until all their Watch calls return, and returns nil. If a Watch returns
// before that, or panics, Run calls it again after a pause of 100 ms to 10 s (doubling, with jitter); meanwhile the
// source's last snapshot stays in the set. Only one Run may run at a time; a second one returns an error at once. A
// later Run goes on where the last one ended.
func (s *Set) Run(ctx context.Context) error {
	if !s.running.CompareAndSwap(false, true) {
		return errRunning
	}
	defer s.running.Store(false)
	var wg sync.WaitGroup
	for i := range s.sources {
		wg.Go(func() { s.watchForever(ctx, i) })
	}
	wg.Wait()
	<-ctx.Done()
	return nil
}

func (s *Set) watchForever(ctx context.Context, source int) {
	pause := firstPause
	for ctx.Err() == nil {
		began := time.Now()
		err := s.watch(ctx, source)
		if ctx.Err() != nil {
			return
		}
		s.report(source, err)
		if time.Since(began) > lastPause {
			pause = firstPause
		}
		if !sleep(ctx, pause/2+rand.N(pause/2)) { //nolint:gosec // jitter, guards nothing
			return
		}
		pause = min(2*pause, lastPause)
	}
}

// watch calls the source's Watch once. It always returns an error. It turns a panic into an error, since a foreign
// source must not end the process.
func (s *Set) watch(ctx context.Context, source int) (err error) {
	var mu sync.Mutex
	ended := false
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
		mu.Lock()
		ended = true
		mu.Unlock()
	}()
	err = s.sources[source].Watch(ctx, func(snap Snapshot) {
		late := func() bool {
			mu.Lock()
			defer mu.Unlock() // deferred, since OnError's function may panic
			if !ended {
				s.replace(source, snap.Endpoints)
			}
			return ended
		}()
		if late {
			s.report(source, errLate)
		}
	})
	if err == nil {
		err = errEnded
	}
	return err
}

func (s *Set) report(source int, err error) {
	if s.onError != nil {
		s.onError(&SourceError{Source: source, Err: err})
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
