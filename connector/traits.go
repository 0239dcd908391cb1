// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
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
	// also if one engine serves the request alone, see [ClientRequest.Without]. The first member names the protocol in
	// errors.
	Members []string
	// Carries are members that mostly keep two engines from serving a request together, but not with this protocol.
	// [Traits.CheckRequest] lists the members.
	Carries []string

	Handoff Handoff // where P's response says where its KV is, and how long that lasts
	Serving Serving // which engines serve which requests
	Ending  Ending  // how legs end, and what becomes of engines then

	OwnRequestID bool // the connector sets an X-Request-Id on both legs, by which the engines match them

	// Timeouts and Retry are the connector's own defaults. What is zero in them is pdkit's default.
	Timeouts config.Timeouts
	Retry    config.Retry

	PairRules  []PairRule  // which engines can exchange KV
	Attributes []Attribute // what engines' entries must have
}

// Handoff says where P's response names the KV that D reads. The zero value means nowhere: decode uses nothing of the
// response.
type Handoff struct {
	Member string // a member of the response's body, with dots between nested names: "kv_transfer_params"
	Header string // a header of the response

	Lease        time.Duration // how long P keeps KV that nobody has read; 0: the handoff does not age
	MultiUse     bool          // a handoff can be read many times, so several choices for one prompt can share it
	ContentStore bool          // D finds the KV in a store by the prompt's tokens alone; the requests do not say where

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
	// of its response's usage. Other engines give P's count there, or none.
	ReusedInUsage bool
}

// Ending says how legs end, and what becomes of engines then.
type Ending struct {
	EndsByLength bool // P transfers nothing unless it ends by length: see [NewPrefillLeg]
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
	// failed, unless the request itself has that text as a stop string, see [ClientRequest.StopsAt].
	FailureStop string
}

// Attribute is an attribute that an engine's entry must have. An [EndpointChecker] decides which values are right.
type Attribute struct {
	Name   string
	Role   discovery.Role // the role of the engines that must have it: prefill, decode, or both
	Remedy string         // what to write, for the reader of the error that it is missing
}

// Check returns an error if the declaration cannot be kept to, whatever the connector does.
func (t *Traits) Check() error {
	if t.Name == "" || t.Name != strings.ToLower(t.Name) {
		return fmt.Errorf("Traits.Name is %q: write a name in lower case", t.Name)
	}
	members := slices.Concat(t.Members, t.Carries)
	if t.Handoff.Member != "" {
		members = append(members, t.Handoff.Member)
	}
	for _, member := range members {
		if slices.Contains(strings.Split(member, "."), "") {
			return fmt.Errorf("a member %q in Traits: write names with one dot between them", member)
		}
	}
	if t.Handoff.Lease < 0 {
		return errors.New("Traits.Handoff.Lease is negative: write 0 for a handoff that does not age")
	}
	return errors.Join(t.Timeouts.Check(), t.Retry.Check())
}

// CarriesAPI reports whether the protocol supports a client API.
func (t *Traits) CarriesAPI(a API) bool {
	if t.APIs == nil {
		return a != APIUnknown && a != APISGLang
	}
	return slices.Contains(t.APIs, a)
}

// CheckRequest returns an *[UnsupportedError] if two engines cannot serve a request together by this protocol. The
// flow's policy then decides: one engine serves the whole request, or the flow refuses it. Reasons are that the
// protocol does not support the API, and these members:
//
//   - prompt, prompt_embeds, text, input_ids: several prompts in one body; P's response has only the handoff of the
//     first;
//   - prompt_logprobs, or echo with logprobs, or echo alone in a chat (which vLLM treats as prompt_logprobs): D
//     computes the prompt itself, and nobody reads the handoff; prompt_logprob_token_ids and skip_reading_prefix_cache
//     of /inference/v1/generate do the same (vllm/sampling_params.py);
//   - truncate_prompt_tokens below 0, or truncation other than disabled of /v1/responses: the engine cuts the prompt to
//     what the limit of tokens leaves, which differs between the legs, and D answers wrongly to P's prompt
//     (vllm/renderers/params.py);
//   - use_beam_search: vLLM loses the transfer members on both legs;
//   - background, previous_response_id of /v1/responses: only one engine has the response's state;
//   - n, best_of above 1 if the handoff is not for MultiUse: the first reader frees the blocks.
//
// A member in Carries is no reason. The error is a *[RequestError] if D would refuse the request because of a member
// that P's leg loses or changes, or because its prompt is empty: the flow then refuses it, whatever its policy. With
// RefusalHolds it is one, too, if the request has no prompt. A connector with reasons of its own is a
// [RequestChecker]; see the function [CheckRequest].
func (t *Traits) CheckRequest(r *ClientRequest) error {
	if !t.CarriesAPI(r.API) {
		if len(t.Members) > 0 {
			return &UnsupportedError{Member: t.Members[0]}
		}
		return &UnsupportedError{Member: r.API.PromptMember()}
	}
	if err := r.checkMembers(t.SGLang, t.Ending.EndsByLength); err != nil {
		return err
	}
	if member := r.uncarried(!t.Handoff.MultiUse, t.Carries); member != "" {
		return &UnsupportedError{Member: member}
	}
	if member := r.lacksPrompt(); t.Ending.RefusalHolds && member != "" {
		return &RequestError{Param: member, Message: "must be given, and not be empty"}
	}
	return nil
}

// CheckRequest returns what a flow with connector c would find against a request before it picks engines: the
// connector's own *[RequestError], with which the flow refuses the request whatever its policy, or an
// *[UnsupportedError].
func CheckRequest(c KVConnector, r *ClientRequest) error {
	t := c.Traits()
	unsupported := t.CheckRequest(r)
	if _, also := errors.AsType[*UnsupportedError](unsupported); unsupported != nil && !also {
		return unsupported
	}
	if own, ok := As[RequestChecker](c); ok {
		err := own.CheckRequest(r)
		if _, also := errors.AsType[*UnsupportedError](err); err != nil && !also {
			return err
		}
		return cmp.Or(unsupported, err)
	}
	return unsupported
}

// CheckEndpoint returns which declared attributes an engine's entry lacks. An engine of role both needs those of both
// roles, unless the protocol serves pairs only: then it takes part in none. If the protocol is PrefillPairOnly, the
// role both is a fault itself.
func (t *Traits) CheckEndpoint(e discovery.Endpoint) error {
	if t.Serving.PairOnly && e.Role.Has(discovery.RoleBoth) {
		return nil
	}
	if t.Serving.PrefillPairOnly && e.Role.Has(discovery.RoleBoth) {
		return &config.FieldError{Path: "role", Problem: "is both, but here a request without a decode engine " +
			"ends the engine that can prefill", Remedy: "write prefill or decode"}
	}
	var faults []error
	for _, a := range t.Attributes {
		if e.Role&a.Role != 0 && strings.TrimSpace(e.Attribute(a.Name)) == "" {
			faults = append(faults, &config.FieldError{Path: "attributes." +
				a.Name, Problem: "is missing", Remedy: a.Remedy})
		}
	}
	return errors.Join(faults...)
}

// CheckEndpoint returns what an engine's entry lacks for a connector: declared attributes that are missing, and what
// the connector's [EndpointChecker] finds. Faults are [config.FieldError]s whose paths begin with "attributes."; nil
// means that there is none.
func CheckEndpoint(c KVConnector, e discovery.Endpoint) error {
	t := c.Traits()
	missing := t.CheckEndpoint(e)
	own, ok := As[EndpointChecker](c)
	if !ok {
		return missing
	}
	errs := []error{missing}
	for _, fe := range config.FieldErrors(own.CheckEndpoint(e)) {
		if !slices.ContainsFunc(config.FieldErrors(missing), func(m *config.FieldError) bool {
			return m.Path == fe.Path
		}) {
			errs = append(errs, fe)
		}
	}
	return errors.Join(errs...)
}
