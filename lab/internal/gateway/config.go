// SPDX-License-Identifier: Apache-2.0

// Package gateway writes configurations of cmd/gateway.
package gateway

import (
	"bytes"
	"encoding/json"
)

// Object is a part of a configuration.
type Object = map[string]any

// Config is the configuration of a gateway with some ModelServers, by their specs. It is JSON, which YAML includes.
func Config(listen, admin string, servers ...Object) ([]byte, error) {
	var b bytes.Buffer
	documents := json.NewEncoder(&b)
	err := documents.Encode(Object{"apiVersion": "pdkit.dev/v1alpha1", "kind": "Gateway",
		"spec": Object{"listen": listen, "admin": admin}})
	for _, spec := range servers {
		if err != nil {
			break
		}
		b.WriteString("---\n")
		err = documents.Encode(Object{"apiVersion": "networking.matrixinfer.ai/v1alpha1", "kind": "ModelServer",
			"metadata": Object{"name": spec["model"]}, "spec": spec})
	}
	return b.Bytes(), err
}

// Static is the discovery of engines at these URLs, which have no attributes.
func Static(prefill, decode []string, more ...Object) Object {
	for _, url := range prefill {
		more = append(more, Object{"url": url, "role": "prefill"})
	}
	for _, url := range decode {
		more = append(more, Object{"url": url, "role": "decode"})
	}
	return Object{"static": Object{"endpoints": more}}
}
