// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/multi"
	"github.com/pdkit/pdkit/connector/names"
)

// renderMulti puts the children's kv_transfer_configs into one MultiConnector's, in the order of the list, and collects
// the other settings that they need. A child's own engine configuration overrides what its connector renders.
func renderMulti(c *multi.Connector, t Target) (Settings, error) {
	children := c.Children()
	out := Settings{Engine: "vllm"}
	var list []map[string]any
	var errs []error
	role := ""
	for i := range children {
		ch := &children[i]
		s, kv, err := renderChild(ch, t)
		if err != nil {
			errs = append(errs, config.Within(ch.At, err))
			continue
		}
		list = append(list, kv)
		switch r, _ := kv["kv_role"].(string); {
		case role == "":
			role = r
		case role != r:
			role = "kv_both" // the children have different roles, so the whole has both
		}
		errs = append(errs, collect(&out, &s, ch.At))
	}
	if err := errors.Join(errs...); err != nil {
		return Settings{}, err
	}
	out.KVTransfer = &KVTransfer{Connector: "MultiConnector", Role: role,
		Extra: map[string]any{"connectors": list}}
	out.noteIf(len(children) > 1, "config.connectors",
		"the engine loads from the first in the list that has the prompt, and has no second chance if that fails")
	return out, nil
}

// renderChild gives a child's settings, and its kv_transfer_config as a plain object.
func renderChild(c *multi.Child, t Target) (s Settings, kv map[string]any, err error) {
	switch s, err = Render(c.KVConnector, c.Config, t); {
	case err == nil:
	case !errors.Is(err, ErrNoSettings):
		return s, nil, err
	case c.Engine == nil:
		return s, nil, refuse("", "has no launch settings",
			"write it as the engine does: {kv_connector, kv_role, kv_connector_extra_config}")
	}
	if s.Engine != "" && s.Engine != "vllm" || s.KVTransfer == nil && c.Engine == nil {
		return s, nil, refuse("", "is no connector of vLLM's", "MultiConnector takes vLLM's connectors only")
	}
	kv = map[string]any{}
	if s.KVTransfer != nil {
		if err := json.Unmarshal([]byte(s.KVTransfer.JSON()), &kv); err != nil {
			return s, nil, err
		}
	}
	if slices.Contains(names.Classes(), c.Name) && !slices.Contains(renamedClasses, c.Name) {
		kv["kv_connector"] = c.Name
	}
	if c.Engine != nil {
		overrideTransfer(kv, c.Engine)
	}
	return s, kv, nil
}

// renamedClasses are the names of one class in different versions of the engine. The child's connector chooses between
// them.
var renamedClasses = []string{"SharedStorageConnector", "ExampleConnector"}

// overrideTransfer overrides what was rendered by the engine's own configuration.
func overrideTransfer(kv map[string]any, e *multi.EngineConfig) {
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
	extra, _ := kv["kv_connector_extra_config"].(map[string]any)
	if extra == nil {
		extra = map[string]any{}
	}
	for key, raw := range e.Extra {
		extra[key] = raw
	}
	kv["kv_connector_extra_config"] = extra
}

const keepOne = "keep one of the two, with stores beside it"

// collect adds a child's settings other than its kv_transfer_config. If two children need different values of one
// variable or file, they cannot run in one engine.
func collect(out, s *Settings, at string) error {
	var errs []error
	for _, arg := range s.Args {
		if !slices.Contains(out.Args, arg) || !strings.HasPrefix(arg, "-") {
			out.Args = append(out.Args, arg)
		}
	}
	for _, e := range s.Env {
		i := slices.IndexFunc(out.Env, func(o EnvVar) bool { return o.Name == e.Name })
		switch {
		case i < 0:
			out.Env = append(out.Env, e)
		case out.Env[i].Value != e.Value:
			errs = append(errs, refuse(at, "wants another value of "+e.Name+" than a connector before it", keepOne))
		}
	}
	for _, f := range s.Files {
		i := slices.IndexFunc(out.Files, func(o File) bool { return o.Name == f.Name })
		switch {
		case i < 0:
			out.Files = append(out.Files, f)
		case out.Files[i] != f:
			errs = append(errs,
				refuse(at, "wants another file "+strconv.Quote(f.Name)+" than a connector before it", keepOne))
		}
	}
	for _, k := range s.Companions {
		if !slices.ContainsFunc(out.Companions,
			func(o Companion) bool { return o.Name == k.Name && slices.Equal(o.Command, k.Command) }) {
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

// renderKVBM makes PdConnector of P's MultiConnector, and gives D its NIXL child alone.
func renderKVBM(c *multi.Connector, t Target) (Settings, error) {
	children := c.Children()
	switch KVRole(t.Endpoint.Role) {
	case "kv_both":
		return Settings{}, refuseBoth("PdConnector never loads another engine's KV")
	case "kv_consumer":
		s, kv, err := renderChild(&children[1], t)
		if err != nil {
			return s, config.Within(children[1].At, err)
		}
		out := Settings{Engine: "vllm"}
		if err := collect(&out, &s, children[1].At); err != nil {
			return out, err
		}
		raw, err := json.Marshal(kv)
		if err == nil {
			out.KVTransfer = &KVTransfer{}
			err = json.Unmarshal(raw, out.KVTransfer)
		}
		return out, err
	}
	s, err := renderMulti(c, t)
	if err != nil {
		return s, err
	}
	s.KVTransfer.Connector, s.KVTransfer.ModulePath, s.KVTransfer.Role = "PdConnector",
		"kvbm.vllm_integration.connector", "kv_both"
	s.noteIf(children[0].Traits().Name == "DynamoConnector", "config.connectors",
		"DYN_KVBM_CPU_CACHE_GB must say how much memory P's tier has; DYN_KVBM_DISK_CACHE_GB adds a disk")
	return s, nil
}
