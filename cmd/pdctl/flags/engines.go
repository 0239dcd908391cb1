// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/discovery"
)

var vllmShort = map[string]string{
	"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-q": "quantization",
	"-dpl": "data-parallel-size-local", "-dpa": "data-parallel-address", "-dpp": "data-parallel-rpc-port",
	"-dpb": "data-parallel-backend",
	"-dpr": "data-parallel-rank", "-dpn": "data-parallel-rank", "-dpc": "data-parallel-hybrid-lb", "-n": "nnodes",
	"-r": "node-rank", "-cc": "compilation-config", "-O": "optimization-level",
}

// vllm reads the arguments of `vllm serve` (vllm/engine/arg_utils.py, entrypoints/openai/cli_args.py).
func (e *Engine) vllm(argv []string, env map[string]string, files map[string][]byte) error {
	a := split(argv, vllmShort, "served-model-name")
	if err := e.configFile(&a, files); err != nil {
		return err
	}
	if err := e.sizes(a, []string{"tensor-parallel-size"}, []string{"pipeline-parallel-size"},
		[]string{"data-parallel-size"}); err != nil {
		return err
	}
	e.Model = a.model("model", "model-tag")
	e.Served = a.lists["served-model-name"]
	if e.args["kv-cache-dtype"] == "auto" {
		delete(e.args, "kv-cache-dtype")
	}
	if e.args["dtype"] == "auto" {
		delete(e.args, "dtype")
	}
	ec, err := transferConfig(a, "ec-transfer-config")
	if err != nil {
		return err
	}
	raw, err := transferConfig(a, "kv-transfer-config")
	if err != nil {
		return err
	}
	if ec != nil {
		e.Encoder = &Encoder{Class: text(ec, "ec_connector"), Role: text(ec, "ec_role"),
			Extra: object(ec, "ec_connector_extra_config")}
		if e.Encoder.Role == "ec_producer" && raw == nil {
			e.Role = discovery.RoleEncode
		}
	}
	if raw == nil {
		return nil
	}
	t, err := transfer(raw, 0)
	if err != nil {
		return err
	}
	e.Transfer = &t
	e.Role = kvRole(t.Role)
	if err := e.mooncakeStore(env, files); err != nil {
		return err
	}
	return e.lmcache(env, files)
}

// model returns the value of the first of the names that is given, or else the first positional argument.
func (a arguments) model(names ...string) string {
	return cmp.Or(a.first(names...), strings.Join(a.positional[:min(len(a.positional), 1)], ""))
}

// settings reads a configuration file that the engine names. It returns nothing for the name "" and for a file that the
// caller did not give. what names the file in an error.
func (e *Engine) settings(file, what string, files map[string][]byte) (map[string]any, error) {
	if file == "" {
		return nil, nil
	}
	content, ok := files[file]
	if !ok {
		e.Unread = append(e.Unread, file)
		return nil, nil
	}
	settings, err := readSettings(content)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return settings, nil
}

// configFile reads the file of `vllm serve --config FILE`. The command line overrides it.
func (e *Engine) configFile(a *arguments, files map[string][]byte) error {
	settings, err := e.settings(a.flags["config"], "--config", files)
	if err != nil {
		return err
	}
	for name, v := range settings {
		name = strings.ReplaceAll(name, "_", "-")
		if _, given := a.flags[name]; given {
			continue
		}
		switch v := v.(type) {
		case string:
			a.flags[name] = v
		case map[string]any:
			raw, err := json.Marshal(v)
			if err != nil {
				return fmt.Errorf("--config: %w", err)
			}
			a.flags[name] = string(raw)
		case []any:
			if _, given := a.lists[name]; given {
				continue
			}
			for _, item := range v {
				a.lists[name] = append(a.lists[name], fmt.Sprint(item))
			}
		case nil:
		default:
			a.flags[name] = fmt.Sprint(v)
		}
	}
	if name := a.flags["served-model-name"]; name != "" && len(a.lists["served-model-name"]) == 0 {
		a.lists["served-model-name"] = []string{name}
	}
	return nil
}

// transferConfig returns the JSON object of an argument, overridden by its dotted members; nil if there is none.
func transferConfig(a arguments, flag string) (map[string]any, error) {
	text, given := a.flags[flag]
	dotted := a.dotted[flag]
	if !given && len(dotted) == 0 {
		return nil, nil
	}
	config := map[string]any{}
	if given {
		v, err := decodeJSON([]byte(text))
		object, isObject := v.(map[string]any)
		if err != nil || !isObject {
			return nil, fmt.Errorf("--%s is not one JSON object", flag)
		}
		config = object
	}
	for _, path := range slices.Sorted(maps.Keys(dotted)) {
		at := config
		steps := strings.Split(path, ".")
		for _, step := range steps[:len(steps)-1] {
			inner, ok := at[step].(map[string]any)
			if !ok {
				inner = map[string]any{}
				at[step] = inner
			}
			at = inner
		}
		at[steps[len(steps)-1]] = plainValue(dotted[path])
	}
	return config, nil
}

// transfer reads one configuration. depth bounds MultiConnectors inside MultiConnectors.
func transfer(raw map[string]any, depth int) (Transfer, error) {
	t := Transfer{
		Class: text(raw, "kv_connector"), Role: text(raw, "kv_role"), EngineID: text(raw, "engine_id"),
		FailurePolicy: text(raw, "kv_load_failure_policy"), Port: text(raw, "kv_port"), Rank: text(raw, "kv_rank"),
		Extra: object(raw, "kv_connector_extra_config"),
	}
	if t.Class == "" {
		return t, errors.New("--kv-transfer-config has no kv_connector")
	}
	children, _ := t.Extra["connectors"].([]any)
	if t.Class != "MultiConnector" && t.Class != "PdConnector" || depth > 4 {
		return t, nil
	}
	for _, c := range children {
		m, ok := c.(map[string]any)
		if !ok {
			return t, errors.New("--kv-transfer-config: a child of MultiConnector is not an object")
		}
		child, err := transfer(m, depth+1)
		if err != nil {
			return t, err
		}
		if child.EngineID == "" { // children inherit it (multi_connector.py)
			child.EngineID = t.EngineID
		}
		if child.Role == "" {
			child.Role = t.Role
		}
		t.Children = append(t.Children, child)
	}
	return t, nil
}

func kvRole(role string) discovery.Role {
	switch role {
	case "kv_producer":
		return discovery.RolePrefill
	case "kv_consumer":
		return discovery.RoleDecode
	case "kv_both":
		return discovery.RoleBoth
	}
	return 0
}

// lmcache collects LMCache's settings: those of its file, overridden by LMCACHE_* variables, overridden by lmcache.*
// members of the connector's own settings (lmcache/integration/vllm/utils.py).
func (e *Engine) lmcache(env map[string]string, files map[string][]byte) error {
	var extra map[string]any
	for _, t := range e.Transfer.Leaves() {
		if strings.HasPrefix(t.Class, "LMCacheConnector") {
			extra = t.Extra
		}
	}
	if extra == nil {
		return nil
	}
	e.LMCache = map[string]any{}
	file := cmp.Or(env["LMCACHE_CONFIG_FILE"], text(extra, "config_path"))
	settings, err := e.settings(file, "configuration file of LMCache", files)
	if err != nil {
		return err
	}
	maps.Copy(e.LMCache, settings)
	for name, v := range env {
		if key, ok := strings.CutPrefix(name, "LMCACHE_"); ok && key != "CONFIG_FILE" {
			e.LMCache[strings.ToLower(key)] = plainValue(v)
		}
	}
	for name, v := range extra {
		if key, ok := strings.CutPrefix(name, "lmcache."); ok {
			e.LMCache[key] = v
		}
	}
	return nil
}

// mooncakeVariables are the variables that replace members of Mooncake's file if there is no file
// (vllm/distributed/mooncake_store.py).
var mooncakeVariables = map[string]string{
	"MOONCAKE_MASTER": "master_server_address", "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
	"MOONCAKE_TENANT_ID": "tenant_id",
}

// mooncakeStore collects the settings of Mooncake's store.
func (e *Engine) mooncakeStore(env map[string]string, files map[string][]byte) error {
	if !slices.ContainsFunc(e.Transfer.Leaves(),
		func(t *Transfer) bool { return t.Class == "MooncakeStoreConnector" }) {
		return nil
	}
	e.Mooncake = map[string]any{}
	for variable, key := range mooncakeVariables {
		if v := env[variable]; v != "" {
			e.Mooncake[key] = v
		}
	}
	settings, err := e.settings(env["MOONCAKE_CONFIG_PATH"], "configuration file of Mooncake", files)
	maps.Copy(e.Mooncake, settings)
	return err
}

// sglang reads the arguments of SGLang's server (sglang/srt/server_args.py).
func (e *Engine) sglang(argv []string) error {
	a := split(argv, nil)
	if err := e.sizes(a, []string{"tp-size", "tp", "tensor-parallel-size"},
		[]string{"pp-size", "pp", "pipeline-parallel-size"},
		[]string{"dp-size", "dp", "data-parallel-size"}); err != nil {
		return err
	}
	e.Model = a.model("model-path", "model")
	if name := a.flags["served-model-name"]; name != "" {
		e.Served = []string{name}
	}
	switch a.flags["disaggregation-mode"] {
	case "prefill":
		e.Role = discovery.RolePrefill
	case "decode":
		e.Role = discovery.RoleDecode
	}
	return nil
}

// trtllm reads the arguments of trtllm-serve (tensorrt_llm/commands/serve.py). The engine gets no role, since the
// disaggregation server decides whether a server is for context or for generation.
func (e *Engine) trtllm(argv []string, files map[string][]byte) error {
	a := split(argv, nil)
	if err := e.sizes(a, []string{"tp-size"}, []string{"pp-size"}, []string{"dp-size"}); err != nil {
		return err
	}
	e.Model = a.model("model")
	settings, err := e.settings(a.first("extra-llm-api-options", "config"), "--extra_llm_api_options", files)
	if err != nil {
		return err
	}
	if transceiver := object(settings, "cache_transceiver_config"); len(transceiver) > 0 {
		e.args["transceiver-backend"] = strings.ToUpper(text(transceiver, "backend"))
	}
	return nil
}
