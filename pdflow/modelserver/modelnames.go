// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
)

// anyName is the name in ModelNames that stands for all others.
const anyName = "*"

// ServedModel returns the name by which engines serve the model that requests name: that of Model in
// [Spec.ModelNames], else Model itself. It is "*" where engines serve whatever a request names.
func (m *ModelServer) ServedModel() string {
	return cmp.Or(m.Spec.ModelNames[m.Model()], m.Spec.ModelNames[anyName], m.Model())
}

// namedModels are the options by which flows exchange the names. Requests may name Model, too.
func (m *ModelServer) namedModels() (opts []pdflow.Option) {
	if len(m.Spec.ModelNames) > 0 && m.Model() != anyName {
		opts = append(opts, pdflow.WithModel(m.ServedModel(), m.Model()))
	}
	for _, name := range slices.Sorted(maps.Keys(m.Spec.ModelNames)) {
		if served := m.Spec.ModelNames[name]; name == anyName {
			opts = append(opts, pdflow.WithModel(served))
		} else {
			opts = append(opts, pdflow.WithModel(served, name))
		}
	}
	return opts
}

func (m *ModelServer) checkModelNames() {
	const at = "spec.modelNames"
	names := m.Spec.ModelNames
	for _, name := range slices.Sorted(maps.Keys(names)) {
		path, served := config.FieldPath(at, name), names[name]
		switch further, known := names[served]; {
		case name == "":
			m.fault(at, "has an empty name", "write the name that requests have: the engines' name")
		case served == "" || served == anyName:
			m.fault(path, "is no name of a model", "write the name by which the engines serve it")
		case known && further != served:
			m.fault(path, "is a name that stands for another model itself",
				fmt.Sprintf("write %q, if that is the engines' name", further))
		case name != served && slices.Contains(m.Spec.Adapters, name):
			m.fault(path, "is an adapter's own name, too: see spec.adapters", "write another one, or leave one out")
		}
	}
}
