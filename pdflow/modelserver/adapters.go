// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"encoding/json"
	"slices"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Adapters are the LoRA adapters that belong to a model: these, or where it is nil those that the model's engines list.
// In an object, auto is nil, and off is none. A program that serves the flows asks engines for theirs (package inspect)
// if Auto says so.
type Adapters []string

// Auto reports whether they are those that engines list.
func (a Adapters) Auto() bool { return a == nil }

// UnmarshalJSON reads auto, off, YAML's false or a list of names.
func (a *Adapters) UnmarshalJSON(raw []byte) error {
	switch string(raw) {
	case `"auto"`:
		*a = nil
		return nil
	case `"off"`, "false":
		*a = Adapters{}
		return nil
	}
	var names []string
	if json.Unmarshal(raw, &names) != nil || names == nil || slices.Contains(names, "") {
		return &config.FieldError{Problem: "is neither a mode nor a list of names",
			Remedy: "write auto, off or [NAME, …]"}
	}
	*a = names
	return nil
}

// Serves returns what [pdflow.WithAdapters] is to be given for engines of a set; nil where there are no adapters.
func (a Adapters) Serves(engines *discovery.Set) func(model string) bool {
	switch {
	case a.Auto():
		return pick.Adapters(engines)
	case len(a) == 0:
		return nil
	}
	return func(model string) bool { return slices.Contains(a, model) }
}
