// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/launch"
)

// engine is what engines must be launched with.
type engine struct {
	class, module string
	extra         map[string]any
	env           []launch.EnvVar
}

// Render gives the engines' class, their role, and what the settings have for the engines.
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	if c.engine.class == "" {
		return launch.Settings{}, &config.FieldError{Path: "config.kv_connector", Problem: "is missing",
			Remedy: "write the engines' class name; without it nothing can be rendered"}
	}
	s := launch.Settings{
		Engine: "vllm",
		KVTransfer: &launch.KVTransfer{Connector: c.engine.class, Role: launch.KVRole(t.Endpoint.Role),
			ModulePath: c.engine.module, Extra: c.engine.extra},
		Args: []string{"--enable-prompt-tokens-details"},
		Env:  c.engine.env,
	}
	if c.name == TPUName {
		if s.KVTransfer.Role == "kv_both" {
			return launch.Settings{}, &config.FieldError{Path: "role",
				Problem: "is both, and an engine with TPUConnector either sends or receives",
				Remedy:  "write prefill or decode; a decode engine serves requests alone, too"}
		}
		if t.CPU {
			s.Notes = append(s.Notes, launch.Note{Path: "cpu",
				Text: "tpu-inference needs TPUs: these settings are for them"})
		}
	} else if c.lease > 0 {
		s.Notes = append(s.Notes, launch.Note{Path: "config.leaseDuration",
			Text: "how long P keeps unread KV is a setting of the engines that pdkit does not know: keep the two " +
				"equal"})
	}
	s.Notes = append(s.Notes, launch.NoLimits(t.Resources, "KV stays in the engines' own memory")...)
	return s, nil
}
