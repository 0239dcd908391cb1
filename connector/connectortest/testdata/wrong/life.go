// SPDX-License-Identifier: Apache-2.0

package wrong

import (
	"bytes"
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
)

const (
	ruleName        = "the name is lower case and the registered one"
	ruleTraits      = "what Traits declares is constant and consistent"
	ruleOrder       = "the order is known and has the abilities that it needs"
	ruleUnsupported = "what Traits declares to be carried is not refused"
	ruleConfig      = "configurations are read strictly"
	rulePrepare     = "a side call ends with its context"
	ruleExpect      = "waiting for an event ends with its context, and need not begin"
	ruleCleanup     = "cleaning up ends with its context"
	ruleStart       = "Start and Close leave nothing behind, in any number"
)

// forAMoment is longer than a test waits; it is not forever, so that the test leaves nothing behind.
const forAMoment = 2 * time.Second

var identityFaults = []Fault{
	declares(ruleName, "has an upper-case name", func(t *connector.Traits) { t.Name = "Conformance-Toy" }),
	declares(ruleName, "has another name than the registered one", func(t *connector.Traits) {
		t.Name = "another-toy"
	}),
	with(ruleTraits, "has a new name each time", func(f *faulty) {
		var n atomic.Int32
		f.traits = func(t *connector.Traits) { t.Name += []string{"", "-1"}[n.Add(1)%2] }
	}),

	declares(ruleOrder, "has an order that nobody knows", func(t *connector.Traits) { t.Order = 9 }),
	declares(ruleOrder, "decodes first and cannot tell a cold response", func(t *connector.Traits) {
		t.Order = connector.DecodeFirst
	}),
	declares(ruleOrder, "runs both legs together and waits for an event", func(t *connector.Traits) {
		t.Order = connector.Together
	}),
	with(ruleTraits, "has a new order each time", func(f *faulty) {
		var n atomic.Int32
		f.traits = func(t *connector.Traits) { t.Order = connector.Order(n.Add(1) % 2) }
	}),

	with(ruleUnsupported, "carries nothing", func(f *faulty) {
		f.checkRequest = func(*connector.ClientRequest) error { return &connector.UnsupportedError{Member: "model"} }
	}),
	with(ruleUnsupported, "refuses what it can carry", func(f *faulty) {
		f.checkRequest = func(r *connector.ClientRequest) error {
			if r.Stream {
				return &connector.UnsupportedError{Member: "stream"}
			}
			return nil
		}
	}),
}

var configFaults = []Fault{
	configured(ruleConfig, "ignores unknown settings", func(settings json.RawMessage) (connector.KVConnector, error) {
		t, err := New(nil)
		if err == nil && len(bytes.TrimSpace(settings)) > 0 {
			err = json.Unmarshal(settings, &t.o)
		}
		return t, err
	}),
	configured(ruleConfig, "does not say where a fault is",
		func(settings json.RawMessage) (connector.KVConnector, error) {
			t, err := New(settings)
			if err != nil {
				return nil, &config.FieldError{Problem: "is not a configuration"}
			}
			return t, nil
		}),
	configured(ruleConfig, "does not name the nearest setting",
		func(settings json.RawMessage) (connector.KVConnector, error) {
			t, err := New(settings)
			if err != nil {
				all := config.FieldErrors(err)
				all[0].Remedy = ""
				return nil, all[0]
			}
			return t, nil
		}),
	configured(ruleConfig, "repeats the configuration in its error",
		func(settings json.RawMessage) (connector.KVConnector, error) {
			t, err := New(settings)
			if err != nil {
				all := config.FieldErrors(err)
				all[0].Problem += " in " + string(settings)
				return nil, all[0]
			}
			return t, nil
		}),
	configured(ruleConfig, "needs a configuration", func(settings json.RawMessage) (connector.KVConnector, error) {
		if len(settings) == 0 {
			return nil, &config.FieldError{Path: "blockSize", Problem: "is missing"}
		}
		return New(settings)
	}),
	configured(ruleConfig, "panics at what is no object",
		func(settings json.RawMessage) (connector.KVConnector, error) {
			if len(settings) > 0 && settings[0] == '[' {
				panic("a list")
			}
			return New(settings)
		}),
}

var lifeFaults = []Fault{
	with(rulePrepare, "waits for another session's side call as long as that takes", func(f *faulty) {
		var one sync.Mutex
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			one.Lock()
			defer one.Unlock()
			return f.Toy.Prepare(ctx, s, call)
		}
	}),
	with(rulePrepare, "asks again until it is answered", func(f *faulty) {
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (v any, err error) {
			for end := time.Now().Add(forAMoment); time.Now().Before(end); time.Sleep(time.Millisecond) {
				if v, err = f.Toy.Prepare(ctx, s, call); err == nil {
					return v, nil
				}
			}
			return nil, err
		}
	}),
	with(rulePrepare, "does without a response", func(f *faulty) {
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			v, err := f.Toy.Prepare(ctx, s, call)
			if err != nil {
				v = "engine-0"
			}
			return v, nil
		}
	}),
	with(rulePrepare, "never asks again after a failure", func(f *faulty) {
		var failed atomic.Bool
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			v, err := f.Toy.Prepare(ctx, s, call)
			if err != nil {
				failed.Store(true)
			}
			if failed.Load() {
				return nil, names.ErrUnknown
			}
			return v, err
		}
	}),

	with(ruleExpect, "waits whatever its context says", func(f *faulty) {
		f.expect = func(*connector.Session) (func(context.Context) (connector.Event, error), func(error)) {
			end := time.Now().Add(forAMoment)
			return func(context.Context) (connector.Event, error) {
				time.Sleep(time.Until(end))
				return connector.Event{}, context.DeadlineExceeded
			}, func(error) {}
		}
	}),
	with(ruleExpect, "gives an event that never came", func(f *faulty) {
		f.expect = func(*connector.Session) (func(context.Context) (connector.Event, error), func(error)) {
			return func(context.Context) (connector.Event, error) { return connector.Event{}, nil }, func(error) {}
		}
	}),
	with(ruleExpect, "cannot be given up before it waits", func(f *faulty) {
		f.expect = func(s *connector.Session) (func(context.Context) (connector.Event, error), func(error)) {
			waited := make(chan struct{})
			wait, _ := f.Toy.Expect(s)
			return func(ctx context.Context) (connector.Event, error) { defer close(waited); return wait(ctx) },
				func(error) {
					timer := time.NewTimer(forAMoment)
					defer timer.Stop()
					select {
					case <-waited:
					case <-timer.C:
					}
				}
		}
	}),

	with(ruleCleanup, "cleans up for as long as it takes", func(f *faulty) {
		f.clean = func(context.Context, *connector.Session) error { time.Sleep(forAMoment); return nil }
	}),
	with(ruleCleanup, "panics where nothing was prepared", func(f *faulty) {
		f.clean = func(_ context.Context, s *connector.Session) error {
			if s.Prepared.(string) == "" { //nolint:errcheck // that is the fault
				return names.ErrUnknown
			}
			return nil
		}
	}),

	with(ruleStart, "leaves a goroutine", func(f *faulty) {
		f.start = func(ctx context.Context) error {
			left.Go(func() { time.Sleep(forAMoment) })
			return f.Toy.Start(ctx)
		}
	}),
	with(ruleStart, "panics when it is closed twice", func(f *faulty) {
		closed := make(chan struct{})
		f.closes = func() error { close(closed); return f.Toy.Close() }
	}),
	with(ruleStart, "cannot be closed before it was started", func(f *faulty) {
		var started atomic.Bool
		f.start = func(ctx context.Context) error { started.Store(true); return f.Toy.Start(ctx) }
		f.closes = func() error {
			if !started.Load() {
				return names.ErrUnknown
			}
			return f.Toy.Close()
		}
	}),
}

// noJSON has no JSON, and is equal to itself.
var noJSON = make(chan int)

// left are the goroutines that a fault leaves.
var left sync.WaitGroup

// Wait waits until nothing of the faults runs any more.
func Wait() { left.Wait() }

// Faults are all wrong connectors.
func Faults() []Fault {
	var list []Fault
	for _, some := range [][]Fault{
		identityFaults, traitsFaults, undeclaredFaults, pairFaults, legFaults, idFaults, responseFaults, endpointFaults,
		configFaults,
		lifeFaults, clientFaults,
	} {
		list = append(list, some...)
	}
	return list
}
