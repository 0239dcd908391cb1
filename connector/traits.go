// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
)

// Traits are what is constant about a connector. The flow, pickers, the connector "multi" and package connectortest use
// what a connector declares here; no method repeats it. The zero value of each field is the most common case.
type Traits struct {
	Name string // lower case, as registered

	Order       Order   // when the flow sends the two legs
	OtherOrders []Order // other orders in which the protocol works; "multi" needs one that suits all of its children

	APIs []API // client APIs that the protocol supports; nil means all except SGLang's own

	// RawPrefill is true if the prefill leg begins as the client's request, like the decode leg, since the protocol has
	// limits of its own (SGLang, TensorRT-LLM). Otherwise [KVConnector] gets a leg for one token in one whole response.
	RawPrefill bool

	// SGLang is true if the engines are SGLang's, which check other members of a request than vLLM's do.
	SGLang bool

	// Members are the request members that carry this protocol's transfer instructions, with dots between nested names:
	// "bootstrap_room", "sampling_params.extra.ticket". Only the connector sets them: the flow removes a client's own,
	// also if one engine serves the request alone. The first member names the protocol in
	// errors.
	Members []string
	// Carries are members that mostly keep two engines from serving a request together, but not with this protocol.
	// check.Rules.Declared lists the members.
	Carries []string

	Handoff Handoff // where P's response says where its KV is, and how long that lasts
	Serving Serving // which engines serve which requests
	Ending  Ending  // how legs end, and what becomes of engines then

	OwnRequestID bool // the connector sets an X-Request-Id on both legs, by which the engines match them

	// Timeouts and Retry are the connector's own defaults. What is zero in them is pdkit's default.
	Timeouts config.Timeouts
	Retry    config.Retry

	PairRules  []attr.PairRule // which engines can exchange KV
	Attributes []attr.Required // what engines' entries must have
}

// Handoff says where P's response names the KV that D reads. The zero value means nowhere: decode uses nothing of the
// response.
type Handoff struct {
	Member string // a member of the response's body, with dots between nested names: "kv_transfer_params"
	Header string // a header of the response

	Lease time.Duration // how long P keeps KV that nobody has read; 0: the handoff does not age
	// How long the engines wait for a transfer before they give it up, where that is not the end of a Lease; 0: they
	// wait for ever, or it is not known. Nothing but a check of settings asks for it.
	TransferTimeout time.Duration
	MultiUse        bool // a handoff can be read many times, so several choices for one prompt can share it
	ContentStore    bool // D finds the KV in a store by the prompt's tokens alone; the requests do not say where

	// D's response has Member, too, for a later request's prefill leg. So the flow lets no host relay that response.
	// The flow empties Member in D's responses with or without FromDecode, wherever it reads them.
	FromDecode bool
}

// Named reports whether P's response says where its KV is.
func (h *Handoff) Named() bool { return h.Member != "" || h.Header != "" }

// Serving says which engines serve which requests.
type Serving struct {
	PairOnly bool // D waits for P's KV with every request, so no D can serve alone
	// PrefillPairOnly is true if a request that names no D ends the P that gets it. Then no engine that can prefill
	// gets a decode leg or a whole request: engines are of role prefill or decode, and none of role both. A flow of
	// another connector must not have such prefill engines in its list, as main, as rollout or as fallback.
	PrefillPairOnly bool
	// ReusedInUsage is true if the tokens that D took over, and only those and its own cache's, are the cached tokens
	// of its response's usage. The true count is then P's: the flow gives it to the client, unless pdflow's
	// WithEngineUsage is set. Other engines give P's count there, or none.
	ReusedInUsage bool
	// CountKey is a key of the handoff from which D takes P's count for its usage, so that D's count is P's, whatever
	// ReusedInUsage says. If P's handoff lacks it, as that of older releases, ReusedInUsage counts. "" is none.
	CountKey string
}

// Ending says how legs end, and what becomes of engines then.
type Ending struct {
	// EndsByLength is true if P transfers nothing unless it ends by length. The prefill leg then has no stop strings or
	// stop tokens, and asks for one token at least, where the API can say so (docs/protocols/vllm.md §4).
	EndsByLength bool
	Orphans      bool // a D whose P failed leaves blocks or tasks behind; the flow counts such legs
	// PrefillFinishes is true if a prefill leg that was sent beside D's has to run to its end, also if nobody needs its
	// response any more. Then D is cancelled at once and P's leg is not: D's waiting request holds tasks of P or blocks
	// of its own, and only P's transfer frees them. If it is false, the flow cancels both legs at once. A prefill leg
	// that runs before D's is always cancelled: nobody waits for its transfer.
	PrefillFinishes bool
	// RefusalReleases is true if a D that refuses a request tells P to let go of the blocks in its kv_transfer_params,
	// and if telling P so twice does no harm. Engines tell P only of bodies that they can parse. So if D refuses a
	// handoff's request, the flow sends D a further one with the same handoff, which D can parse and refuses.
	RefusalReleases bool
	// RefusalHolds is true if a vLLM D that refuses a request sent beside P's leg makes P wait for that leg's end by
	// length. If P refuses the request, too, the flow has P compute two tokens in its place, unless D could not parse
	// the body, which it says by the error type "Bad Request": of such a body P hears nothing. And the flow refuses a
	// request without a prompt by itself.
	RefusalHolds bool
	// FailureStop is the stop_reason with which D ends a response that it gives up. The flow takes such a response for
	// failed, unless the request itself has that text as a stop string.
	FailureStop string
}
