// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/discovery"
)

// Traits are what is constant about a connector. What a connector declares here, the flow, pickers, "multi" and package
// connectortest act on; no method repeats it. The zero value of each field is the most common case.
type Traits struct {
	Name string // lower case, as registered

	Order       Order   // how the two legs stand in time
	OtherOrders []Order // in which the protocol works as well; "multi" looks for one that suits all of its children

	APIs []API // client APIs that the protocol carries; nil is all but SGLang's own

	// Members are the request members that carry this protocol's transfer instructions, with dots between nested names:
	// "bootstrap_room", "sampling_params.extra.ticket". Only the connector sets them: the flow strips a client's own,
	// also where one engine serves the request alone, see [Request.Without]. The first one names the protocol in
	// errors.
	Members []string
	// Carries are members whose requests two engines mostly cannot carry together, but can by this protocol.
	// [Traits.CheckRequest] lists the members.
	Carries []string

	Handoff      Handoff       // where P's response says where its KV is
	Lease        time.Duration // how long P keeps KV that nobody has read; 0: the handoff does not age
	MultiUse     bool          // a handoff can be read many times, so that several answers to one prompt can share it
	EndsByLength bool          // P transfers nothing unless it ends by length, so Prefill calls [Leg.EndByLength]
	OwnRequestID bool          // both legs carry an X-Request-Id of the connector's, by which the engines match them
	ContentStore bool          // D finds the KV by the prompt's tokens alone, in a store; nothing on the wire tells
	PairOnly     bool          // D waits for P's KV with every request, so that no D can serve one alone
	Orphans      bool          // a D whose P failed leaves blocks or tasks behind; the flow counts such legs

	// Timeouts and Retry are the connector's own defaults. What is zero in them is pdkit's default.
	Timeouts config.Timeouts
	Retry    config.Retry

	PairRules  []PairRule  // which engines can exchange KV
	Attributes []Attribute // what engines' entries must have
}

// Handoff says where P's response names the KV that D is to read. The zero value is nowhere: decode reads nothing of
// the response.
type Handoff struct {
	Member string // of the response's body, with dots between nested names: "kv_transfer_params"
	Header string // of the response
}

// Attribute is one that an engine's entry must have. Which values are right, an [EndpointChecker] tells.
type Attribute struct {
	Name   string
	Role   discovery.Role // the role of the engines that must have it: prefill, decode, or both
	Remedy string         // what to write, for whoever reads that it is missing
}

// CarriesAPI reports whether the protocol carries a client API.
func (t *Traits) CarriesAPI(a API) bool {
	if t.APIs == nil {
		return a != APIUnknown && a != APISGLang
	}
	return slices.Contains(t.APIs, a)
}

// CheckRequest returns an *[UnsupportedError] if two engines cannot carry a request together by this protocol. The flow
// then goes by its policy: one engine serves it whole, or it is refused. Reasons are that the protocol does not carry
// the API, and:
//
//   - prompt, prompt_embeds, text, input_ids: several prompts in one body; P answers with the handoff of the first
//     only;
//   - prompt_logprobs, or echo with logprobs, or echo alone in a chat (which vLLM takes for prompt_logprobs): D
//     computes the prompt itself, and the handoff is left to expire; prompt_logprob_token_ids and
//     skip_reading_prefix_cache of /inference/v1/generate do the same (vllm/sampling_params.py);
//   - truncate_prompt_tokens below 0, or truncation other than disabled of /v1/responses: the prompt is cut to what the
//     limit of tokens leaves, which is another on each leg, and D answers wrongly to P's prompt
//     (vllm/renderers/params.py);
//   - use_beam_search: vLLM loses the transfer members on both legs;
//   - background, previous_response_id of /v1/responses: the answer's state lives in one engine;
//   - n, best_of above 1 where the handoff is not for MultiUse: the first reader frees the blocks.
//
// Carries takes members from the list. A connector with reasons of its own is a [RequestChecker]; see the function
// [CheckRequest].
func (t *Traits) CheckRequest(r *Request) error {
	if !t.CarriesAPI(r.API) {
		if len(t.Members) > 0 {
			return &UnsupportedError{Member: t.Members[0]}
		}
		return &UnsupportedError{Member: r.API.PromptMember()}
	}
	if member := r.uncarried(!t.MultiUse, t.Carries); member != "" {
		return &UnsupportedError{Member: member}
	}
	return nil
}

// CheckRequest tells what a flow with connector c would find against a request, before it picks engines: a
// *[RequestError] of the connector's own, by which the request is refused whatever the policy, or an
// *[UnsupportedError].
func CheckRequest(c KVConnector, r *Request) error {
	t := c.Traits()
	unsupported := t.CheckRequest(r)
	if own, ok := As[RequestChecker](c); ok {
		err := own.CheckRequest(r)
		if _, also := errors.AsType[*UnsupportedError](err); err != nil && !also {
			return err
		}
		return cmp.Or(unsupported, err)
	}
	return unsupported
}

// CheckEndpoint tells which declared attributes an engine's entry has not. An engine of role both must have those of
// either role, unless the protocol serves pairs only: then it takes part in none.
func (t *Traits) CheckEndpoint(e discovery.Endpoint) error {
	if t.PairOnly && e.Role.Has(discovery.RoleBoth) {
		return nil
	}
	var faults []error
	for _, a := range t.Attributes {
		if e.Role&a.Role != 0 && strings.TrimSpace(e.Attribute(a.Name)) == "" {
			faults = append(faults, &config.FieldError{Path: "attributes." + a.Name, Problem: "is missing", Remedy: a.Remedy})
		}
	}
	return errors.Join(faults...)
}

// CheckEndpoint tells what an engine's entry lacks for a connector: attributes that it declares and the entry has not,
// and what its [EndpointChecker] finds. Faults are [config.FieldError]s whose paths begin with "attributes."; nil is good.
func CheckEndpoint(c KVConnector, e discovery.Endpoint) error {
	t := c.Traits()
	missing := t.CheckEndpoint(e)
	own, ok := As[EndpointChecker](c)
	if !ok {
		return missing
	}
	errs := []error{missing}
	for _, fe := range config.FieldErrors(own.CheckEndpoint(e)) {
		if !slices.ContainsFunc(config.FieldErrors(missing), func(m *config.FieldError) bool { return m.Path == fe.Path }) {
			errs = append(errs, fe)
		}
	}
	return errors.Join(errs...)
}
