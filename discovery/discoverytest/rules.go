// SPDX-License-Identifier: Apache-2.0

package discoverytest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// started makes a check of one that begins when the source is watched and has published its first list.
func started(check func(*trial, *watching) error) func(*trial) error {
	return func(t *trial) error {
		w := t.watch(t.ctx)
		if err := t.first(0); err != nil {
			return err
		}
		return check(t, w)
	}
}

func checkBlocks(t *trial, w *watching) error {
	t.settle(w)
	select {
	case <-w.returned:
		//nolint:errorlint // %v and not %w, since the error may be nil
		return fmt.Errorf("Watch returned (%v) while its context lived and its backend worked", w.err)
	default:
		return nil
	}
}

func checkEnds(t *trial, w *watching) error {
	t.cancel()
	if err := t.await(w); err != nil {
		return err
	}
	return endError(w.err)
}

func checkEndedContext(t *trial) error {
	t.cancel()
	w := t.watch(t.ctx)
	if err := t.await(w); err != nil {
		return err
	}
	return endError(w.err)
}

func endError(err error) error {
	if err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("Watch returned %w, want nil or its context's error", err)
	}
	return nil
}

// checkAgain calls Watch again after a failure, as a set does.
func checkAgain(t *trial) error {
	ctx, cancel := context.WithCancel(t.ctx)
	defer cancel()
	w := t.watch(ctx)
	if err := t.first(0); err != nil {
		return err
	}
	cancel()
	if err := t.await(w); err != nil {
		return err
	}
	before := t.all()
	t.watch(t.ctx)
	if err := t.first(len(before)); err != nil {
		return fmt.Errorf("the second Watch: %w", err)
	}
	return nil
}

// checkFirst has nothing to add to started.
func checkFirst(*trial, *watching) error { return nil }

func checkEndpoints(t *trial, w *watching) error {
	if t.Change != nil {
		if err := t.change(); err != nil {
			return err
		}
	}
	t.settle(w)
	for _, r := range t.all() {
		seen := make(map[string]bool, len(r.then))
		for _, e := range r.then {
			if err := e.Validate(); err != nil {
				return fmt.Errorf("version %d: %w", r.snap.Version, err)
			}
			if seen[e.ID] {
				return fmt.Errorf("version %d lists %q twice", r.snap.Version, e.ID)
			}
			seen[e.ID] = true
		}
	}
	return nil
}

// change alters the backend and waits for a list that differs from the last one.
func (t *trial) change() error {
	before := t.all()
	if err := t.Change(); err != nil {
		return fmt.Errorf("the harness's Change: %w", err)
	}
	last := before[len(before)-1]
	return t.until(len(before), "the change was not published", func(r []record) bool {
		return len(r) > 0 && !reflect.DeepEqual(r[len(r)-1].then, last.then)
	})
}

func checkVersions(t *trial, _ *watching) error {
	for range 3 {
		if err := t.change(); err != nil {
			return err
		}
	}
	all := t.all()
	for i := range all[1:] {
		if old, now := all[i].snap.Version, all[i+1].snap.Version; now <= old {
			return fmt.Errorf("version %d was followed by version %d", old, now)
		}
	}
	return nil
}

// checkError breaks the backend. The source may then stay silent, publish what it knows, or return an error and be
// watched again. It must not publish a list without the endpoints that it knew.
func checkError(t *trial, w *watching) error {
	t.settle(w) // a source may need several lists until its first complete one
	before := t.all()
	good := ids(before[len(before)-1].then)
	if len(good) == 0 {
		return errors.New("the list is empty before the backend breaks: nothing can be learnt")
	}
	if err := t.Break(); err != nil {
		return fmt.Errorf("the harness's Break: %w", err)
	}
	w = t.rewatch(w, t.Settle)
	for _, r := range t.all()[len(before):] {
		now := ids(r.then)
		for id := range good {
			if _, ok := now[id]; !ok {
				return fmt.Errorf("version %d lost %q because the backend failed", r.snap.Version, id)
			}
		}
	}
	if err := t.Repair(); err != nil {
		return fmt.Errorf("the harness's Repair: %w", err)
	}
	return t.recovers(w)
}

// rewatch observes the source for d. Whenever Watch returns, it calls Watch again after a pause.
func (t *trial) rewatch(w *watching, d time.Duration) *watching {
	for end := time.Now().Add(d); time.Now().Before(end) && t.ctx.Err() == nil; {
		t.settle(w)
		select {
		case <-w.returned:
			time.Sleep(t.Settle / 10)
			w = t.watch(t.ctx)
		default:
		}
	}
	return w
}

// recovers checks that a source shows a change after its backend is repaired, if the harness can make a change. That
// may take several calls of Watch, since each source decides how long it waits for its backend.
func (t *trial) recovers(w *watching) error {
	if t.Change == nil {
		return nil
	}
	seen := make(chan error, 1)
	go func() { seen <- t.change() }()
	for {
		w = t.rewatch(w, t.Settle)
		select {
		case err := <-seen:
			if err != nil {
				return fmt.Errorf("after the repair: %w", err)
			}
			return nil
		default:
		}
	}
}

func checkDraining(t *trial, w *watching) error {
	t.settle(w)
	before := len(t.all())
	id, err := t.Remove()
	if err != nil {
		return fmt.Errorf("the harness's Remove: %w", err)
	}
	if _, listed := ids(t.all()[before-1].then)[id]; !listed {
		return fmt.Errorf("the harness removed %q, which was not on the list", id)
	}
	drained, gone := false, false
	err = t.until(before, fmt.Sprintf("%q is still on the list", id), func(records []record) bool {
		drained = false
		for _, r := range records {
			phase, listed := ids(r.then)[id]
			if !listed {
				gone = true
				return true
			}
			drained = drained || phase == discovery.PhaseDraining
		}
		return false
	})
	if err != nil {
		return err
	}
	if gone && !drained {
		return fmt.Errorf("%q left the list without having been draining", id)
	}
	return nil
}

func checkAfter(t *trial, w *watching) error {
	t.cancel()
	if err := t.await(w); err != nil {
		return err
	}
	before := len(t.all())
	if t.Change != nil {
		if err := t.Change(); err != nil {
			return fmt.Errorf("the harness's Change: %w", err)
		}
	}
	time.Sleep(t.Settle)
	if late := len(t.all()) - before; late > 0 {
		return fmt.Errorf("%d snapshots were published after Watch had returned", late)
	}
	return nil
}

func checkImmutable(t *trial, w *watching) error {
	if t.Change != nil {
		for range 2 {
			if err := t.change(); err != nil {
				return err
			}
		}
	}
	t.settle(w)
	t.cancel()
	if err := t.await(w); err != nil {
		return err
	}
	for _, r := range t.all() {
		if !reflect.DeepEqual(r.snap.Endpoints, r.then) {
			return fmt.Errorf("version %d was altered after it had been published", r.snap.Version)
		}
	}
	return nil
}
