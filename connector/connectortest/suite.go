// SPDX-License-Identifier: Apache-2.0

// Package connectortest checks that a [connector.KVConnector] keeps the rules of its interface: those that pdkit has, and any other.
//
// An author of a connector calls [Run] from a test, and [Golden] for exchanges as the engines' own versions have them:
//
//	func TestConformance(t *testing.T) {
//		connectortest.Run(t, connectortest.Harness{
//			Name: "myproto",
//			New:  func(config json.RawMessage) (connector.KVConnector, error) { return connector.Open(connector.Spec{Type: "myproto", Config: config}) },
//			// A valid configuration. Give each setting a value other than its default: the suite misspells, doubles and removes them.
//			Config: json.RawMessage(`{"pollInterval":"50ms"}`),
//			// What the protocol needs to know of its engines. The suite gives URLs and IDs, removes each attribute in turn, and makes the engines IPv6.
//			Prefill: discovery.Endpoint{Attributes: map[string]string{"bootstrapPort": "8998"}},
//			// P's good answer to a prefill leg, if decode reads it; the suite derives bad ones from it.
//			Answer: func(s *connector.Session, prefill []byte) []byte {
//				return connectortest.AnswerWith(s.API, "kv_transfer_params", `{"remote_id":"`+s.ID+`"}`)
//			},
//			Needs: []string{"kv_transfer_params.remote_id"},
//		})
//	}
//
//	func TestGolden(t *testing.T) { connectortest.Golden(t, newConnector, "testdata/golden") }
//
//	func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
//
// Whatever the protocol does otherwise than most is said in [Harness.Except], one exception each, so that a reader of the test sees it.
// The suite plays sessions as package pdflow does, without a network: a [connector.Preparer] calls [Harness.Call], an event is
// [Harness.Event]'s. Each rule has a connector of its own, made by [Harness.New], started if it is a [connector.Starter], and closed.
package connectortest

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"testing"
)

// A rule is one thing that connectors must keep.
type rule struct {
	name  string
	check func(*trial) error // doesNotApply says why there is nothing to check
	raw   bool               // the connector is not started
}

var rules = []rule{
	{"the name is lower case, constant and the registered one", checkName, true},
	{"the order is constant, known and has the abilities that it needs", checkOrder, true},
	{"every client API gives two well-formed legs", checkLegs, false},
	{"prefill asks for one token in the members that the request used", checkLimit, false},
	{"prefill asks for one whole answer without log probabilities", checkWhole, false},
	{"prefill keeps the client's other members, byte for byte", checkPrefillKeeps, false},
	{"decode is the client's request but for the protocol's own members, byte for byte", checkDecodeKeeps, false},
	{"no transfer member of the client's reaches an engine", checkTransferGone, false},
	{"the client's request id names nothing", checkRequestID, false},
	{"both legs carry one id, new with each attempt", checkIDs, false},
	{"equal sessions give equal legs, whatever runs beside them", checkStateless, false},
	{"the client's body and the engines' answers are neither changed nor kept", checkBorrowed, false},
	{"a malformed prefill answer never becomes a decode leg", checkBadAnswers, false},
	{"unknown keys and big integers of a handoff are no fault and keep their digits", checkHandoffKeeps, false},
	{"whatever engines answer, nothing panics", checkHostile, false},
	{"an answer that P has finished is whole, and tells the client nothing of the transfer", checkFinal, false},
	{"an answer of D's that is rewritten keeps its text", checkRewrite, false},
	{"IPv6 engines get brackets where an address has a port", checkIPv6, false},
	{"an engine without an attribute is refused, and the configuration check says so", checkAttributes, false},
	{"rules about pairs are constant, forbid something, and part no engine from its like", checkPairs, true},
	{"what the protocol cannot carry is named, and nothing else", checkUnsupported, true},
	{"configurations are read strictly", checkConfig, true},
	{"errors hold no prompt, address or value", checkSecrets, false},
	{"a side call ends with its context", checkPrepareEnds, false},
	{"waiting for an event ends with its context, and need not begin", checkExpect, false},
	{"cleaning up ends with its context", checkCleanup, false},
	{"Start and Close leave nothing behind, in any number", checkStartClose, true},
	{"launch settings are complete, constant and name every setting", checkRender, true},
}

// notApplicable is why a rule has nothing to check.
type notApplicable string

func (n notApplicable) Error() string { return string(n) }

// Run checks a connector in one subtest per rule. A rule that does not apply to the connector passes, and logs why.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			err := h.try(t.Context(), r)
			if why, ok := errors.AsType[notApplicable](err); ok {
				t.Log("does not apply: " + string(why))
				return
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// Check is Run without testing: it returns every rule that is broken, joined, or nil, or ctx's error once that ended.
func Check(ctx context.Context, h Harness) error {
	var broken []error
	for _, r := range rules {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := h.try(ctx, r)
		if _, ok := errors.AsType[notApplicable](err); err != nil && !ok {
			broken = append(broken, fmt.Errorf("%s: %w", r.name, err))
		}
	}
	return errors.Join(broken...)
}

// try runs one rule on a connector of its own.
func (h Harness) try(ctx context.Context, r rule) (err error) {
	if err := h.fill(); err != nil {
		return fmt.Errorf("the harness: %w", err)
	}
	t, err := h.newTrial(ctx, !r.raw)
	if err != nil {
		return err
	}
	defer func() {
		if e := t.end(); err == nil {
			err = e
		}
	}()
	return guard(func() error { return r.check(t) })
}

// panicError is a panic of the connector's code.
type panicError struct {
	value any
	stack string
}

func (p *panicError) Error() string { return fmt.Sprintf("panic: %v\n%s", p.value, p.stack) }

// guard makes a panic an error.
func guard(call func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			_, stack, _ := strings.Cut(string(debug.Stack()), "panic(")
			err = &panicError{v, stack}
		}
	}()
	return call()
}

func panicked(err error) bool {
	_, ok := errors.AsType[*panicError](err)
	return ok
}
