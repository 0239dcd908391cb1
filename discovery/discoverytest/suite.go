// SPDX-License-Identifier: Apache-2.0

// Package discoverytest checks that a [discovery.Source] keeps the rules of its interface, and has a source for
// tests, [Manual].
//
// An author of a source calls [Run] from a test:
//
//	func TestSource(t *testing.T) {
//		discoverytest.Run(t, discoverytest.Harness{New: func() discovery.Source { … }})
//	}
package discoverytest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// Harness has a source under test and functions that act on its backend. Only New is required. Without the other
// functions the suite cannot check some rules; Run logs which.
type Harness struct {
	// New returns a source that has not been watched yet. Its backend works and lists at least one endpoint. The suite
	// calls New once per rule. The other functions act on the backend of the source that New returned last.
	New func() discovery.Source

	// Change alters the backend's list once, in any way that a source must publish. The suite calls it several times.
	Change func() error

	// Break makes the backend fail, for example by closing its connections or garbling its file. Repair undoes it.
	Break, Repair func() error

	// Remove makes the backend announce that one endpoint is going away, and later take it off its list. It returns the
	// endpoint's ID. It is only for backends that announce such things.
	Remove func() (id string, err error)

	Timeout time.Duration // how long a source may take to do something; default 5 s
	Settle  time.Duration // how long the suite waits to see that a source does not do something; default 100 ms
}

// A rule is one requirement of discovery.Source's documentation.
type rule struct {
	name  string
	check func(*trial) error
	needs string // the functions of the harness without which the rule cannot be checked
}

func (h Harness) lacks(functions string) bool {
	return functions == "Change" && h.Change == nil ||
		functions == "Break and Repair" && (h.Break == nil || h.Repair == nil) ||
		functions == "Remove" && h.Remove == nil
}

// rules are in the order of discovery.Source's documentation.
var rules = []rule{
	{"watch blocks until its context ends", started(checkBlocks), ""},
	{"watch returns nil or the context's error", started(checkEnds), ""},
	{"watch returns when its context has ended already", checkEndedContext, ""},
	{"a source can be watched again", checkAgain, ""},
	{"rule 1: the first snapshot comes by itself", started(checkFirst), ""},
	{"rule 2: endpoints are valid and their ids unique", started(checkEndpoints), ""},
	{"rule 2: versions rise with each change", started(checkVersions), "Change"},
	{"rule 3: an error keeps the last good snapshot", started(checkError), "Break and Repair"},
	{"rule 4: draining comes before removal", started(checkDraining), "Remove"},
	{"rule 5: nothing is published after the return", started(checkAfter), ""},
	{"a published snapshot is never altered", started(checkImmutable), ""},
}

// Run checks a source, with one subtest per rule. Each subtest also checks that no two goroutines call publish at once.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, r := range rules {
		if h.lacks(r.needs) {
			t.Logf("not checked, since the harness has no %s: %s", r.needs, r.name)
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			if err := h.try(t.Context(), r); err != nil {
				t.Error(err)
			}
		})
	}
}

// Check does what Run does, without testing.T. It returns all broken rules, joined, or nil. If ctx ends, it returns
// ctx's error.
func Check(ctx context.Context, h Harness) error {
	var broken []error
	for _, r := range rules {
		if err := ctx.Err(); err != nil {
			return err
		}
		if h.lacks(r.needs) {
			continue
		}
		if err := h.try(ctx, r); err != nil {
			broken = append(broken, fmt.Errorf("%s: %w", r.name, err))
		}
	}
	return errors.Join(broken...)
}

func (h Harness) try(ctx context.Context, r rule) error {
	h.Timeout = cmp.Or(h.Timeout, 5*time.Second)
	h.Settle = cmp.Or(h.Settle, 100*time.Millisecond)
	if h.New == nil {
		return errors.New("the harness has no New")
	}
	t := newTrial(ctx, h)
	err := r.check(t)
	if ended := t.end(); err == nil {
		err = ended
	}
	return err
}
