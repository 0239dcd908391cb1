// SPDX-License-Identifier: Apache-2.0

// Package connectortest checks that a [connector.KVConnector] keeps the rules of its interface: those that pdkit has,
// and any other.
//
// An author of a connector calls [Run] from a test, and [Golden] for exchanges as the engines' own versions have them:
//
//	var harness = connectortest.Harness{
//		Name: "myproto",
//		// Valid settings, each other than its default: the suite misspells, doubles and removes them.
//		Config: json.RawMessage(`{"pollInterval":"50ms"}`),
//		// What the protocol needs to know of its engines. The suite gives URLs and IDs, removes each attribute in
//		// turn, and makes the engines IPv6.
//		Prefill: discovery.Endpoint{Attributes: map[string]string{"bootstrapPort": "8998"}},
//		// P's good response. The suite puts the handoff where Traits declares it, and derives bad ones.
//		Response: func(s *connector.Session, prefill []byte) connectortest.Response {
//			return connectortest.Response{Handoff: `{"remote_id":"` + s.ID + `"}`}
//		},
//		Needs: []string{"remote_id"}, // keys of a handoff that is an object
//	}
//
//	func TestConformance(t *testing.T) { connectortest.Run(t, harness) }
//
//	func TestGolden(t *testing.T) { connectortest.Golden(t, connectortest.Open("myproto"), "testdata/golden") }
//
//	func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
//
// Which rules apply follows from what the connector declares ([connector.Traits]) and from its abilities, and a
// declaration that does not fit the legs fails:
//
//   - APIs, Carries, MultiUse: each such request is played, in Order and in OtherOrders;
//   - Members: a leg sets no other member, and a client's own value of one reaches no leg, however it is spelt;
//   - Handoff: a response without a good one never becomes a decode leg; without it, decode reads nothing of the body;
//     each member that is null does what it does if it is absent, so let Response have the optional keys, too;
//   - OwnRequestID, EndsByLength: the legs are so exactly if it is declared;
//   - Attributes: the legs fail without each of them, and without no other.
//
// Lease, TransferTimeout, PairOnly, Orphans, PrefillFinishes, RefusalReleases, RefusalHolds and FailureStop are facts
// about engines, which no leg shows.
//
// Whatever the protocol does otherwise than most is said in [Harness.Except], one exception each, so that a reader of
// the test sees it. The suite plays sessions as package pdflow does, without a network: a [connector.Preparer] calls
// [Harness.Call], an event is [Harness.Event]'s. Each rule has a connector of its own, made by [Harness.New], started
// if it is a [connector.Starter], and closed.
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
	check func(*trial) error // notApplicable says why there is nothing to check
	raw   bool               // the connector is not started
}

var rules = []rule{
	{"the name is lower case and the registered one", checkName, true},
	{"what Traits declares is constant and consistent", checkTraits, true},
	{"the order is known and has the abilities that it needs", checkOrder, true},
	{"every client API gives two well-formed legs", checkLegs, false},
	{"prefill asks for one token in the members that the request used", checkLimit, false},
	{"prefill asks for one whole response without log probabilities", checkWhole, false},
	{"prefill keeps the client's other members, byte for byte", checkPrefillKeeps, false},
	{"decode is the client's request but for the protocol's own members, byte for byte", checkDecodeKeeps, false},
	{"no transfer member of the client's reaches an engine", checkTransferGone, false},
	{"the client's request id names nothing", checkRequestID, false},
	{"both legs have an id of the connector's exactly if Traits declares it", checkOwnRequestID, false},
	{"prefill ends by length exactly if Traits declares it", checkEndsByLength, false},
	{"both legs carry one id, new with each attempt", checkIDs, false},
	{"equal sessions give equal legs, whatever runs beside them", checkStateless, false},
	{"the client's body and the engines' responses are neither changed nor kept", checkBorrowed, false},
	{"a malformed prefill response never becomes a decode leg", checkBadResponses, false},
	{"decode reads nothing of P's response that Traits does not declare", checkUndeclaredHandoff, false},
	{"a member of an engine's that is null is as one that is absent", checkNulls, false},
	{"unknown keys and big integers of a handoff are no fault and keep their digits", checkHandoffKeeps, false},
	{"whatever engines respond, nothing panics", checkHostile, false},
	{"a response that P has finished is whole, and tells the client nothing of the transfer", checkFinal, false},
	{"a response of D's that is rewritten keeps its text", checkRewrite, false},
	{"IPv6 engines get brackets where an address has a port", checkIPv6, false},
	{"an engine without a declared attribute is refused, and needs no other", checkAttributes, false},
	{"rules about pairs are constant, forbid something, and part no engine from its like", checkPairs, true},
	{"what Traits declares to be carried is not refused", checkUnsupported, true},
	{"configurations are read strictly", checkConfig, true},
	{"errors hold no prompt, address or value", checkSecrets, false},
	{"a side call ends with its context", checkPrepareEnds, false},
	{"waiting for an event ends with its context, and need not begin", checkExpect, false},
	{"cleaning up ends with its context", checkCleanup, false},
	{"Start and Close leave nothing behind, in any number", checkStartClose, true},
}

// notApplicable is why a rule has nothing to check.
type notApplicable string

func (n notApplicable) Error() string { return string(n) }

// Run checks a connector in one subtest per rule. A rule that does not apply to the connector passes, and logs why.
func Run(t *testing.T, h Harness) {
	t.Helper()
	if err := h.usable(t.Context()); err != nil {
		t.Fatal(err)
	}
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
	if err := h.usable(ctx); err != nil {
		return err
	}
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

// usable tells what makes every rule fail: a fault of the harness, or one that does not fit what the connector
// declares.
func (h Harness) usable(ctx context.Context) error {
	if err := h.fill(); err != nil {
		return fmt.Errorf("the harness: %w", err)
	}
	_, err := h.newTrial(ctx, false)
	return err
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
