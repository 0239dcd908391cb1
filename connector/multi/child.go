// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
)

// Child is one connector of the list.
type Child struct {
	connector.KVConnector
	At     string          // connectors[0]
	Name   string          // as the list writes it: nixl, NixlConnector
	Config json.RawMessage // the settings that the connector was made of
	Engine *EngineConfig   // the engine's own configuration of the child; nil for {type, config}
	traits connector.Traits
}

// spec is a child in the form {type, config}. Other members of a kvConnector belong to the whole, not to a child.
type spec struct {
	Type       string          `json:"type"`
	Config     json.RawMessage `json:"config"`
	Parameters json.RawMessage `json:"parameters"`
}

// EngineConfig is vLLM's KVTransferConfig, in the form that MultiConnector has for each child
// (vllm/config/kv_transfer.py).
type EngineConfig struct {
	Connector     string                     `json:"kv_connector"`
	Role          string                     `json:"kv_role"`
	EngineID      string                     `json:"engine_id"`
	BufferDevice  string                     `json:"kv_buffer_device"`
	BufferSize    config.Number              `json:"kv_buffer_size"`
	Rank          config.Number              `json:"kv_rank"`
	ParallelSize  config.Number              `json:"kv_parallel_size"`
	IP            string                     `json:"kv_ip"`
	Port          config.Number              `json:"kv_port"`
	ModulePath    string                     `json:"kv_connector_module_path"`
	PermuteLocal  bool                       `json:"enable_permute_local_kv"`
	FailurePolicy string                     `json:"kv_load_failure_policy"`
	Extra         map[string]json.RawMessage `json:"kv_connector_extra_config"`
}

const maxChildren = 16 // no engine has more, and each child costs time on every request

func openChild(i int, raw json.RawMessage) (Child, error) {
	c := Child{At: "connectors[" + strconv.Itoa(i) + "]"}
	if i >= maxChildren {
		return c, &config.FieldError{Path: c.At, Problem: "is one too many",
			Remedy: "at most " + strconv.Itoa(maxChildren) + " are read"}
	}
	var err error
	var members map[string]json.RawMessage
	if json.Unmarshal(raw, &members) == nil && members["kv_connector"] != nil {
		err = c.openEngine(raw)
	} else {
		err = c.openSpec(raw)
	}
	if err == nil {
		c.traits = c.Traits()
	}
	return c, config.Within(c.At, err)
}

func (c *Child) openSpec(raw json.RawMessage) error {
	var s spec
	if err := config.Decode(raw, &s); err != nil {
		return err
	}
	word, settings := "config", s.Config
	switch {
	case s.Type == "":
		return &config.FieldError{Path: "type", Problem: "is missing",
			Remedy: "write a connector's name, or kv_connector with an engine's class name"}
	case s.Config != nil && s.Parameters != nil:
		return &config.FieldError{Path: "parameters", Problem: "is given besides config, which means the same",
			Remedy: "keep one of the two"}
	case s.Parameters != nil:
		word, settings = "parameters", s.Parameters
	}
	return c.open("type", s.Type, word, settings)
}

// open opens the child. typePath and configPath are the paths of its type and its settings in the list, for errors.
func (c *Child) open(typePath, typ, configPath string, settings json.RawMessage) (err error) {
	c.Name, c.Config = typ, settings
	name := names.Resolve(typ, settings)
	if why := outsiders[name]; why != "" {
		return &config.FieldError{Path: typePath, Problem: why, Remedy: outsiderRemedy(name)}
	}
	c.KVConnector, err = connector.Open(config.Spec{Type: name, Config: settings})
	switch {
	case errors.Is(err, names.ErrUnknown):
		return unknown(typePath, typ)
	case err != nil:
		return config.Within(configPath, err)
	}
	return nil
}

// outsiders are connectors that cannot be in the list of vLLM's MultiConnector, with the reason.
var outsiders = map[string]string{
	Name:     "is a multi connector inside another",
	KVBMName: "is a multi connector inside another",
	"http":   "is no connector of an engine's",
	"pynccl": "is a connector of vLLM's V0 engine, which has no MultiConnector",
	"sglang": "is SGLang's",
	"trtllm": "is TensorRT-LLM's",
}

func outsiderRemedy(name string) string {
	if name == Name || name == KVBMName {
		return "list its connectors in the outer one"
	}
	return "list the connectors of vLLM's engines: " + strings.Join(insiders(), ", ")
}

// insiders are the names and classes that the list may have.
func insiders() []string {
	return slices.DeleteFunc(append(names.Connectors(), names.Classes()...),
		func(n string) bool { return outsiders[names.Resolve(n, nil)] != "" })
}

func unknown(path, typ string) error {
	switch why := names.Refusal(typ); {
	case slices.Contains(silentClasses, typ):
		return &config.FieldError{Path: path, Problem: "is an engine's class that has no name here",
			Remedy: "write the child as the engine does: {kv_connector: " + typ + ", kv_role: …}"}
	case why != "":
		return &config.FieldError{Path: path, Problem: why, Remedy: "list connectors that bring KV from P to D"}
	}
	return &config.FieldError{Path: path, Problem: "is not a known connector",
		Remedy: config.Suggest(typ, append(insiders(), silentClasses...))}
}

const extraPath = "kv_connector_extra_config"

// openEngine opens a child that is given as the engine's own configuration. Its settings are the engine's, so settings
// that the connector does not know are not faults; they are only rendered.
func (c *Child) openEngine(raw json.RawMessage) error {
	e := &EngineConfig{}
	if err := config.Decode(raw, e); err != nil {
		return err
	}
	if e.Role != "" && !slices.Contains([]string{"kv_producer", "kv_consumer", "kv_both"}, e.Role) {
		return &config.FieldError{Path: "kv_role", Problem: "is not a known value",
			Remedy: "one of kv_producer, kv_consumer, kv_both"}
	}
	if e.Connector == "" {
		return &config.FieldError{Path: "kv_connector", Problem: "is empty",
			Remedy: "write an engine's class name, as NixlConnector"}
	}
	c.Engine = e
	if e.isSilent() {
		c.Name, c.KVConnector = e.Connector, silent{e.Connector}
		return nil
	}
	all, err := json.Marshal(e.Extra)
	if err != nil {
		return &config.FieldError{Path: extraPath, Problem: "is not an object"}
	}
	name := names.Resolve(e.Connector, all)
	settings := map[string]json.RawMessage{}
	maps.Copy(settings, e.Extra)
	for range len(e.Extra) + 1 {
		if all, err = json.Marshal(settings); err != nil {
			break
		}
		if err = c.open("kv_connector", name, extraPath, all); err == nil || !dropUnknown(settings, err) {
			break
		}
	}
	c.Name = e.Connector
	return err
}

// translated are engine settings that pdkit must know under its own name.
var translated = map[string]func(json.RawMessage) (name string, value json.RawMessage, ok bool){
	// A number of seconds, which limits how long a handoff may be used.
	"kv_lease_duration": func(raw json.RawMessage) (string, json.RawMessage, bool) {
		var n config.Number
		if n.UnmarshalJSON(raw) != nil || n.Value <= 0 {
			return "", nil, false
		}
		return "leaseDuration", connector.Quote(n.String() + "s"), true
	},
}

// dropUnknown removes the settings that the connector does not know, and reports whether there were any.
func dropUnknown(settings map[string]json.RawMessage, err error) bool {
	dropped := false
	for _, fe := range config.FieldErrors(err) {
		key, below := strings.CutPrefix(fe.Path, extraPath)
		if fe.Problem != "unknown field" || !below {
			continue
		}
		key = strings.TrimPrefix(key, ".")
		if quoted, ok := strings.CutPrefix(key, "["); ok {
			if q, err := strconv.Unquote(strings.TrimSuffix(quoted, "]")); err == nil {
				key = q
			}
		}
		raw, there := settings[key]
		if !there {
			continue
		}
		delete(settings, key)
		dropped = true
		if translate := translated[key]; translate != nil {
			if name, value, ok := translate(raw); ok && settings[name] == nil {
				settings[name] = value
			}
		}
	}
	return dropped
}

// label names a child in a message.
func (c *Child) label() string { return fmt.Sprintf("%s (%s)", c.At, c.traits.Name) }
