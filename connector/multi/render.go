// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
)

// Render puts the children's kv_transfer_configs into one MultiConnector's, in the order of the list, and collects the
// other settings that they need. A child's own engine configuration overrides what its connector renders.
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	if c.traits.Name == KVBMName {
		return c.renderKVBM(t)
	}
	return c.renderMulti(t)
}

func (c *Connector) renderMulti(t launch.Target) (launch.Settings, error) {
	out := launch.Settings{Engine: "vllm"}
	var list []map[string]any
	var errs []error
	role := ""
	for i := range c.children {
		ch := &c.children[i]
		s, kv, err := ch.render(t)
		if err != nil {
			errs = append(errs, config.Within(ch.at, err))
			continue
		}
		list = append(list, kv)
		switch r, _ := kv["kv_role"].(string); {
		case role == "":
			role = r
		case role != r:
			role = "kv_both" // the children have different roles, so the whole has both
		}
		errs = append(errs, collect(&out, &s, ch.at))
	}
	if err := errors.Join(errs...); err != nil {
		return launch.Settings{}, err
	}
	out.KVTransfer = &launch.KVTransfer{Connector: "MultiConnector", Role: role,
		Extra: map[string]any{"connectors": list}}
	if len(c.children) > 1 {
		out.Notes = append(out.Notes, launch.Note{Path: "config.connectors",
			Text: "the engine loads from the first in the list that has the prompt, and has no second chance if " +
				"that fails"})
	}
	return out, nil
}

// render gives a child's settings, and its kv_transfer_config as a plain object.
func (c *child) render(t launch.Target) (s launch.Settings, kv map[string]any, err error) {
	switch r, ok := connector.As[launch.Renderer](c.KVConnector); {
	case ok:
		if s, err = r.Render(t); err != nil {
			return s, nil, err
		}
	case c.engine == nil:
		return s, nil, &config.FieldError{Problem: "has no launch settings",
			Remedy: "write it as the engine does: {kv_connector, kv_role, kv_connector_extra_config}"}
	}
	if s.Engine != "" && s.Engine != "vllm" || s.KVTransfer == nil && c.engine == nil {
		return s, nil, &config.FieldError{Problem: "is no connector of vLLM's",
			Remedy: "MultiConnector takes vLLM's connectors only"}
	}
	kv = map[string]any{}
	if s.KVTransfer != nil {
		if err := json.Unmarshal([]byte(s.KVTransfer.JSON()), &kv); err != nil {
			return s, nil, err
		}
	}
	if slices.Contains(connector.Classes(), c.name) && !slices.Contains(renamed, c.name) {
		kv["kv_connector"] = c.name
	}
	if c.engine != nil {
		c.engine.over(kv)
	}
	return s, kv, nil
}

// renamed are the names of one class in different versions of the engine. The child's connector chooses between them.
var renamed = []string{"SharedStorageConnector", "ExampleConnector"}

// over overrides what was rendered by the engine's own configuration.
func (e *engineConfig) over(kv map[string]any) {
	for key, value := range map[string]string{
		"kv_role": e.Role, "engine_id": e.EngineID, "kv_buffer_device": e.BufferDevice, "kv_ip": e.IP,
		"kv_connector_module_path": e.ModulePath, "kv_load_failure_policy": e.FailurePolicy,
	} {
		if value != "" {
			kv[key] = value
		}
	}
	for key, n := range map[string]config.Number{"kv_buffer_size": e.BufferSize, "kv_rank": e.Rank,
		"kv_parallel_size": e.ParallelSize, "kv_port": e.Port} {
		if n.Given {
			kv[key] = n.Value
		}
	}
	if e.PermuteLocal {
		kv["enable_permute_local_kv"] = true
	}
	if len(e.Extra) == 0 {
		return
	}
	extra, _ := kv[extraPath].(map[string]any)
	if extra == nil {
		extra = map[string]any{}
	}
	for key, raw := range e.Extra {
		extra[key] = raw
	}
	kv[extraPath] = extra
}

// collect adds a child's settings other than its kv_transfer_config. If two children need different values of one
// variable or file, they cannot run in one engine.
func collect(out, s *launch.Settings, at string) error {
	var errs []error
	for _, arg := range s.Args {
		if !slices.Contains(out.Args, arg) || !strings.HasPrefix(arg, "-") {
			out.Args = append(out.Args, arg)
		}
	}
	for _, e := range s.Env {
		i := slices.IndexFunc(out.Env, func(o launch.EnvVar) bool { return o.Name == e.Name })
		switch {
		case i < 0:
			out.Env = append(out.Env, e)
		case out.Env[i].Value != e.Value:
			errs = append(errs, &config.FieldError{Path: at,
				Problem: "wants another value of " + e.Name + " than a connector before it", Remedy: oneOfThem})
		}
	}
	for _, f := range s.Files {
		i := slices.IndexFunc(out.Files, func(o launch.File) bool { return o.Name == f.Name })
		switch {
		case i < 0:
			out.Files = append(out.Files, f)
		case out.Files[i] != f:
			errs = append(errs, &config.FieldError{Path: at,
				Problem: "wants another file " + strconv.Quote(f.Name) + " than a connector before it",
				Remedy:  oneOfThem})
		}
	}
	for _, k := range s.Companions {
		if !slices.ContainsFunc(out.Companions,
			func(o launch.Companion) bool { return o.Name == k.Name && slices.Equal(o.Command, k.Command) }) {
			out.Companions = append(out.Companions, k)
		}
	}
	for _, n := range s.Notes {
		if below, ok := strings.CutPrefix(n.Path, "config."); ok {
			n.Path = "config." + at + ".config." + below
		} else {
			n.Text = at + ": " + n.Text
		}
		out.Notes = append(out.Notes, n)
	}
	return errors.Join(errs...)
}
