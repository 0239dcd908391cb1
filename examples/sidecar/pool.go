// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strings"
)

// poolGroup is llm-d's default of --pool-group.
const poolGroup = "inference.networking.k8s.io"

// set reads NAMESPACE/NAME, or NAME in the namespace default, which is llm-d's meaning of it.
func (p *poolFlags) set(text string) error {
	namespace, name, found := strings.Cut(text, "/")
	if !found {
		namespace, name = "default", text
	}
	if namespace == "" || name == "" || strings.Contains(name, "/") {
		return errors.New("want NAMESPACE/NAME or NAME")
	}
	p.namespace, p.name = namespace, name
	return nil
}
