// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// Target is one engine that is to be launched.
type Target struct {
	Endpoint  discovery.Endpoint   // its URL (host and HTTP port), role, group and attributes
	Index     int                  // 0, 1, … among the engines of its role
	Engines   []discovery.Endpoint // all engines of the same model, itself included
	Model     string
	Version   Version          // of the engine; the zero value is the newest that the connector knows
	Resources config.Resources // of the Spec; see [Settings.Notes] for those without effect
	// the host at which engines reach the gateway, for notices and callbacks; "" is loopback
	Gateway string
	CPU     bool // the engine runs on a CPU
}

// Settings are the launch settings that a connector asks for. They leave out what an engine needs without a connector
// too: model, port, memory.
type Settings struct {
	Engine     string      // vllm, sglang or trtllm
	KVTransfer *KVTransfer // vLLM's --kv-transfer-config
	Args       []string    // further arguments, one per element: "--enable-prompt-tokens-details"
	Env        []EnvVar
	Files      []File      // configuration files that Args or Env name
	Companions []Companion // programs that must run beside the engines: a cache server, a master
	Notes      []Note
}

// EnvVar is one environment variable.
type EnvVar struct{ Name, Value string }

// File is a configuration file beside the engine.
type File struct {
	Name    string // a plain name, without folders: "lmcache-prefill-0.yaml"
	Content string
}

// Companion is a program that must run beside the engines, once for all engines of a model, or once for each.
type Companion struct {
	Name      string
	Command   []string
	PerEngine bool
}

// Note says where a setting went, or that it has no effect.
type Note struct {
	NoEffect bool
	Path     string // of the setting, as in a Spec: config.replicationFactor, resources.maxDisk
	Text     string // "NIXL keeps one copy, in the prefill engine's memory"
}

// KVTransfer is vLLM's kv_transfer_config (vllm/config/kv_transfer.py). Zero values are left out.
type KVTransfer struct {
	Connector         string         `json:"kv_connector"`
	Role              string         `json:"kv_role"` // kv_producer, kv_consumer, kv_both
	EngineID          string         `json:"engine_id,omitempty"`
	Rank              *int           `json:"kv_rank,omitempty"`
	ParallelSize      int            `json:"kv_parallel_size,omitempty"`
	BufferDevice      string         `json:"kv_buffer_device,omitempty"`
	BufferSize        float64        `json:"kv_buffer_size,omitempty"` // bytes
	IP                string         `json:"kv_ip,omitempty"`
	Port              int            `json:"kv_port,omitempty"`
	ModulePath        string         `json:"kv_connector_module_path,omitempty"`
	LoadFailurePolicy string         `json:"kv_load_failure_policy,omitempty"` // fail, recompute
	Extra             map[string]any `json:"kv_connector_extra_config,omitempty"`
}

// NoEffect returns a note that the setting at path changes nothing. why ends the sentence.
func NoEffect(path, why string) Note { return Note{NoEffect: true, Path: path, Text: why} }

// NoLimits returns a note for each limit of r that is given: the engine has no setting for any of them. why ends the
// sentences.
func NoLimits(r config.Resources, why string) []Note {
	var notes []Note
	for _, limit := range []struct {
		name  string
		value config.Quantity
	}{{"maxMemory", r.MaxMemory}, {"maxDisk", r.MaxDisk}, {"maxBandwidth", r.MaxBandwidth}} {
		if limit.value != "" {
			notes = append(notes, NoEffect("resources."+limit.name, why))
		}
	}
	return notes
}

// vllm begins the settings of an engine of vLLM.
func vllm(kv *KVTransfer) Settings {
	return Settings{Engine: "vllm", KVTransfer: kv, Args: []string{"--enable-prompt-tokens-details"}}
}

// set adds an environment variable.
func (s *Settings) set(name, value string) { s.Env = append(s.Env, EnvVar{Name: name, Value: value}) }

// setSize adds a parallel size that is above 1.
func (s *Settings) setSize(flag string, n int) {
	if n > 1 {
		s.Args = append(s.Args, flag, strconv.Itoa(n))
	}
}

// setRanks adds an engine's data-parallel sizes, and which of its ranks are behind the entry's URL if not all are.
func (s *Settings) setRanks(r attr.Ranks) {
	s.setSize("--data-parallel-size", r.Size)
	if r.Local < r.Size {
		s.Args = append(s.Args, "--data-parallel-size-local", strconv.Itoa(r.Local), "--data-parallel-start-rank",
			strconv.Itoa(r.Start))
		s.note("attributes."+attr.DPStartRank, "each of the engine's pods also needs --data-parallel-address, the "+
			"first pod's")
	}
}

// note adds a note about the setting at path.
func (s *Settings) note(path, text string) { s.noteIf(true, path, text) }

func (s *Settings) noteIf(given bool, path, text string) {
	if given {
		s.Notes = append(s.Notes, Note{Path: path, Text: text})
	}
}

// idle adds a note that the setting at path changes nothing.
func (s *Settings) idle(path, why string) { s.idleIf(true, path, why) }

func (s *Settings) idleIf(given bool, path, why string) {
	if given {
		s.Notes = append(s.Notes, NoEffect(path, why))
	}
}

// noLimits adds the notes of [NoLimits].
func (s *Settings) noLimits(r config.Resources, why string) {
	s.Notes = append(s.Notes, NoLimits(r, why)...)
}

// orNil is nil for settings without a member, which are then left out.
func orNil(extra map[string]any) map[string]any {
	if len(extra) == 0 {
		return nil
	}
	return extra
}

// member is a member of settings that is written if it is given.
type member struct {
	key   string
	value any
	given bool
}

func addMembers(extra map[string]any, members []member) map[string]any {
	for _, m := range members {
		if m.given {
			extra[m.key] = m.value
		}
	}
	return extra
}

// settleTime is what each connector with a store says of its setting of this name.
const settleTime = "the gateway waits that long between the legs; no setting of an engine"

// refuse is the error for a value of a target that cannot be rendered.
func refuse(path, problem, remedy string) error {
	return &config.FieldError{Path: path, Problem: problem, Remedy: remedy}
}

// refuseBoth is the error for an engine of the role both. engine says what it is and why that does not work.
func refuseBoth(engine string) error {
	return refuse("role", "is both, and an engine with "+engine,
		"write prefill or decode; a decode engine serves requests alone, too")
}

// KVRole returns vLLM's kv_role for an endpoint's role.
func KVRole(r discovery.Role) string {
	switch {
	case r.Has(discovery.RoleBoth):
		return "kv_both"
	case r.Has(discovery.RolePrefill):
		return "kv_producer"
	}
	return "kv_consumer"
}

// JSON writes the configuration as vLLM's command line takes it.
func (t *KVTransfer) JSON() string {
	raw, err := json.Marshal(t)
	if err != nil { // Extra holds what JSON cannot say: a fault of a Func
		return fmt.Sprintf("%q", err.Error())
	}
	return string(raw)
}

// Version is an engine's release, "0.32.0". The zero value is unknown, and counts as newer than all.
type Version = config.EngineVersion

// ParseVersion reads "0.32.0", "v0.32" or "0.32.0+cpu"; "" is the zero value.
func ParseVersion(s string) (Version, error) { return config.ParseEngineVersion(s) }
