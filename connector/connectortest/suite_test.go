// SPDX-License-Identifier: Apache-2.0

package connectortest_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/connectortest/testdata/wrong"
)

func TestCheckNamesEachBrokenRule(t *testing.T) {
	h := toy
	h.New = func(config json.RawMessage) (connector.KVConnector, error) {
		c, err := wrong.New(config)
		return broken{c}, err
	}
	err := connectortest.Check(t.Context(), h)
	require.Error(t, err)
	for _, rule := range []string{
		"the name is lower case and the registered one: ",
		"decode is the client's request but for the protocol's own members, byte for byte: ",
		"a malformed prefill response never becomes a decode leg: ",
	} {
		assert.Contains(t, "\n"+err.Error(), "\n"+rule)
	}
}

// broken is the toy with two methods that are wrong.
type broken struct{ *wrong.Toy }

func (broken) Traits() connector.Traits {
	t := (*wrong.Toy)(nil).Traits()
	t.Name = "TOY"
	return t
}

func (broken) Decode(_ context.Context, _ *connector.Session, _ *connector.PrefillResult, leg *connector.Leg) error {
	leg.Set("stream", json.RawMessage("false"))
	return nil
}

func TestCheckEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, connectortest.Check(ctx, toy), context.Canceled)
}

// Rules that tell of a fault of the harness. Each has a name, so that a case need not run the others.
const (
	legs        = "every client API gives two well-formed legs"
	decodeKeeps = "decode is the client's request but for the protocol's own members, byte for byte"
	name        = "the name is lower case and the registered one"
	malformed   = "a malformed prefill response never becomes a decode leg"
	pairs       = "rules about pairs are constant, forbid something, and part no engine from its like"
	settings    = "configurations are read strictly"
	undeclared  = "decode reads nothing of P's response that Traits does not declare"
)

func TestAFaultOfTheHarnessIsSaid(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(h *connectortest.Harness)
		says  string
		rule  string // that says it
	}{
		"neither New nor Name": {func(h *connectortest.Harness) { h.New, h.Name = nil, "" },
			"the harness: it has neither New nor Name", legs},
		"a bad Config": {func(h *connectortest.Harness) { h.Config = json.RawMessage(`{"blockSise":1}`) },
			"with the harness's Config: blockSise: unknown field", legs},
		"New gives nothing": {func(h *connectortest.Harness) {
			//nolint:nilnil // that is the fault
			h.New = func(json.RawMessage) (connector.KVConnector, error) { return nil, nil }
		}, "with the harness's Config: it is nil", legs},
		"Needs that the response lacks": {func(h *connectortest.Harness) { h.Needs = []string{"remote_port"} },
			"its Response to chat has no kv_transfer_params.remote_port", malformed},
		"no Call": {func(h *connectortest.Harness) { h.Call = nil }, "the harness has no Call", legs},
		"no Response": {func(h *connectortest.Harness) { h.Response = nil },
			"the harness has no Response, but Traits declares a handoff in P's response (member kv_transfer_params)",
			legs},
		"Needs of a handoff that is not declared": {func(h *connectortest.Harness) { h.New = wrong.Undeclared },
			"the harness has Needs, but Traits declares no handoff in a member", legs},
		"a handoff that is not declared": {func(h *connectortest.Harness) { h.New, h.Needs = wrong.Undeclared, nil },
			"the harness: its Response has a Handoff, but Traits declares none", undeclared},
		"a response that is bad": {func(h *connectortest.Harness) {
			h.Response = func(*connector.Session, []byte) connectortest.Response { return connectortest.Response{} }
		}, "chat, plain: calling Decode: no usable KV handoff", legs},
		"a member of the protocol's that is excused": {func(h *connectortest.Harness) {
			h.Except.Rewrites = []string{"kv_ticket"}
		},
			"Except.Rewrites has kv_ticket, which is no client API's member", decodeKeeps},
		"a member that is excused for nothing": {func(h *connectortest.Harness) {
			h.Except.Rewrites = []string{"prompt"}
		},
			"Except.Rewrites has prompt, but each leg has the client's", decodeKeeps},
		"a name that is not registered": {func(h *connectortest.Harness) { h.Name = "other" },
			`its Name is "conformance-toy", but the harness says "other"`, name},
		"a response that is not bad": {func(h *connectortest.Harness) {
			h.BadResponses = []connectortest.Response{{Handoff: `{"remote_blocks":[1],"remote_token":"t"}`}}
		}, "it is BadResponses[0] became a decode leg", malformed},
		"a configuration that is not bad": {func(h *connectortest.Harness) {
			h.BadConfig = []json.RawMessage{json.RawMessage(`{}`)}
		},
			"BadConfig[0]: it is accepted", settings},
		"a value of one's own that no rule is about": {func(h *connectortest.Harness) {
			h.Except.OwnValues = map[string]string{"mode": "read"}
		},
			"the harness says that mode has one value, but no rule is about it", pairs},
		"a value of one's own that others share": {func(h *connectortest.Harness) {
			h.Except.OwnValues = map[string]string{"tpSize": "3"}
		},
			`the harness says that only engines of "3" form pairs with their equals, but others do`, pairs},
		"an empty object that is refused": {func(h *connectortest.Harness) { h.Except.PassesEmpty = true },
			"Except.PassesEmpty is set, but the connector keeps the rule", malformed},
		"an exception that is none": {func(h *connectortest.Harness) { h.Except.NeedsConfig = true },
			"is accepted, but the harness says that it needs one", settings},
	} {
		t.Run(name, func(t *testing.T) {
			h := toy
			c.spoil(&h)
			require.ErrorContains(t, connectortest.CheckRule(t.Context(), h, c.rule), c.says)
		})
	}
}

// Exceptions are for what a protocol does otherwise: each lets its wrong connector pass.
func TestExceptionsAreTaken(t *testing.T) {
	for what, except := range map[string]connectortest.Exceptions{
		"asks for two tokens":                              {KeepsLimit: true},
		"leaves the stream":                                {KeepsStream: true},
		"leaves several choices":                           {KeepsChoices: true},
		"leaves log probabilities":                         {KeepsLogprobs: true},
		"needs a configuration":                            {NeedsConfig: true},
		"pairs equal engines of one value only":            {OwnValues: map[string]string{"tpSize": "4"}},
		"names every transfer alike":                       {NotByID: true},
		"leaves the stream's options":                      {KeepsStream: true},
		"adds a member of its own that nobody was told of": {Rewrites: []string{"return_token_ids"}},
		"leaves the limit that wins":                       {KeepsLimit: true},
		"names the legs differently":                       {NotByID: true},
	} {
		for _, f := range wrong.Faults() {
			if f.What != what {
				continue
			}
			h := toy
			h.New, h.Except = f.New, except
			if f.What == "needs a configuration" {
				h.New = func(settings json.RawMessage) (connector.KVConnector, error) {
					if len(strings.TrimSpace(string(settings))) < 5 { // {} and null, too
						return nil, &config.FieldError{Path: "blockSize", Problem: "is missing"}
					}
					return wrong.New(settings)
				}
			}
			err := connectortest.CheckRule(t.Context(), h, f.Breaks)
			if err != nil {
				assert.NotContains(t, err.Error(), "planted", "%s", what)
				assert.True(t, connectortest.DoesNotApply(err), "%s: %v", what, err)
			}
		}
	}
}

func FuzzToy(f *testing.F) { connectortest.Fuzz(f, toy) }

// A side call that fails in every way is an error of the session, and of no other.
func TestACallThatFailsIsAnError(t *testing.T) {
	h := toy
	h.Call = func(*http.Request) (*http.Response, error) { return nil, errors.New("connection refused") }
	require.ErrorContains(t, connectortest.Check(t.Context(), h), "calling Prepare: connection refused")
}
