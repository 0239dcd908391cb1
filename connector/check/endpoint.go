// SPDX-License-Identifier: Apache-2.0

package check

import (
	"errors"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

// CheckEndpoint returns what an engine's entry lacks: declared attributes that are missing, and what the connector's
// [connector.EndpointChecker] finds. Faults are [config.FieldError]s, most of whose paths begin with "attributes."; nil
// means that there is none. An engine of role both needs the attributes of both roles, unless the protocol serves pairs
// only: then it takes part in none. If the protocol is PrefillPairOnly, the role both is a fault itself.
func (r *Rules) CheckEndpoint(e discovery.Endpoint) error {
	missing := r.missing(e)
	if r.endpoints == nil {
		return missing
	}
	errs := []error{missing}
	for _, fe := range config.FieldErrors(r.endpoints.CheckEndpoint(e)) {
		if !slices.ContainsFunc(config.FieldErrors(missing), func(m *config.FieldError) bool {
			return m.Path == fe.Path
		}) {
			errs = append(errs, fe)
		}
	}
	return errors.Join(errs...)
}

func (r *Rules) missing(e discovery.Endpoint) error {
	serving := &r.Traits.Serving
	if serving.PairOnly && e.Role.Has(discovery.RoleBoth) {
		return nil
	}
	if serving.PrefillPairOnly && e.Role.Has(discovery.RoleBoth) {
		return &config.FieldError{Path: "role", Problem: "is both, but here a request without a decode engine " +
			"ends the engine that can prefill", Remedy: "write prefill or decode"}
	}
	var faults []error
	for _, a := range r.Traits.Attributes {
		if e.Role&a.Role != 0 && strings.TrimSpace(e.Attribute(a.Name)) == "" {
			faults = append(faults,
				&config.FieldError{Path: "attributes." + a.Name, Problem: "is missing", Remedy: a.Remedy})
		}
	}
	return errors.Join(faults...)
}
