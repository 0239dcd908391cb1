// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// targets are the engines whose settings are rendered: each role, for the newest version and the harness's.
func (t *trial) targets() []launch.Target {
	both := t.Prefill
	both.ID, both.Role = "engine-both", discovery.RoleBoth
	engines := []discovery.Endpoint{t.Prefill, t.Decode}
	var list []launch.Target
	for _, v := range append([]launch.Version{{}}, t.Versions...) {
		for _, e := range append(slices.Clone(engines), both) {
			all := engines
			if e.ID == both.ID {
				all = []discovery.Endpoint{both}
			}
			for _, cpu := range []bool{false, true} {
				list = append(list, launch.Target{Endpoint: e, Engines: all, Model: modelName, Version: v, CPU: cpu,
					Gateway: "gateway.example"})
			}
		}
	}
	return list
}

func checkRender(t *trial) error {
	r, ok := connector.As[launch.Renderer](t.c)
	if !ok {
		return notApplicable("it is no Renderer")
	}
	rendered := false
	var refused error
	for _, target := range t.targets() {
		what := fmt.Sprintf("%s, version %q", target.Endpoint.Role, target.Version)
		before := snapshot(target)
		set, err := r.Render(target)
		if err != nil {
			refused = fmt.Errorf("%s: %w", what, err)
			if target.Endpoint.Role == discovery.RoleBoth || target.Version != (launch.Version{}) || target.CPU {
				continue // a protocol may know no such engine
			}
			return refused
		}
		rendered = true
		for range 3 {
			again, err := r.Render(target)
			if err != nil || !reflect.DeepEqual(again, set) {
				return fmt.Errorf("%s: the settings are not the same twice", what)
			}
		}
		if snapshot(target) != before {
			return fmt.Errorf("%s: Render changed its target", what)
		}
		if err := checkSettings(set); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if !rendered {
		return refused
	}
	return t.namesSettings()
}

func snapshot(target launch.Target) string {
	raw, err := json.Marshal(target)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

func checkSettings(set launch.Settings) error {
	switch set.Engine {
	case "vllm", "sglang", "trtllm":
	default:
		return fmt.Errorf("its Engine is %q: want vllm, sglang or trtllm", set.Engine)
	}
	if kv := set.KVTransfer; kv != nil {
		if kv.Connector == "" {
			return errors.New("KVTransfer has no Connector")
		}
		if !slices.Contains([]string{"kv_producer", "kv_consumer", "kv_both"}, kv.Role) {
			return fmt.Errorf("KVTransfer.Role is %q", kv.Role)
		}
		if !strings.HasPrefix(kv.JSON(), "{") || !validJSON(kv.JSON()) {
			return errors.New("KVTransfer has no JSON: what does Extra hold?")
		}
	}
	for _, e := range set.Env {
		if e.Name == "" || strings.ContainsAny(e.Name, "= \n") || strings.ContainsAny(e.Value, "\n\x00") {
			return fmt.Errorf("%q is no environment variable", e.Name)
		}
	}
	for _, f := range set.Files {
		if f.Name == "" || f.Name != path.Base(f.Name) || f.Content == "" {
			return fmt.Errorf("the file %q has a folder in its name or no content", f.Name)
		}
	}
	for _, c := range set.Companions {
		if c.Name == "" || len(c.Command) == 0 {
			return fmt.Errorf("the companion %q has no name or command", c.Name)
		}
	}
	for _, n := range set.Notes {
		if n.Text == "" || n.NoEffect && n.Path == "" {
			return fmt.Errorf("the note about %q has no text or names no setting", n.Path)
		}
	}
	return nil
}

// namesSettings checks that each setting, those inside others too, either changes what is rendered or is named by a
// note.
func (t *trial) namesSettings() error {
	full, err := t.renderAll(t.config())
	if err != nil {
		return err
	}
	return t.namesInner(full, gjson.ParseBytes(t.config()), "", "config")
}

// namesInner checks the settings of an object. at is its path for gjson, shown its path for notes.
func (t *trial) namesInner(full []launch.Settings, object gjson.Result, at, shown string) (fault error) {
	object.ForEach(func(key, value gjson.Result) bool {
		inner, note := strings.TrimPrefix(at+"."+gjsonName(key.Str), "."), config.FieldPath(shown, key.Str)
		switch {
		case slices.Contains(t.Except.OwnSettings, strings.TrimPrefix(note, "config.")), noted(full, note):
		case value.IsObject() && value.Raw != "{}":
			fault = t.namesInner(full, value, inner, note)
		default:
			fault = t.changes(full, inner, note)
		}
		return fault == nil
	})
	return fault
}

func (t *trial) changes(full []launch.Settings, at, note string) error {
	without, err := sjson.DeleteBytes(slices.Clone(t.config()), at)
	if err != nil {
		return err
	}
	less, err := t.renderAll(without)
	if err != nil {
		return nil //nolint:nilerr // the setting is needed, so it is not dropped in silence
	}
	if reflect.DeepEqual(full, less) {
		return fmt.Errorf("the setting %s changes nothing that is rendered, and no note has it as its Path", note)
	}
	return nil
}

func (t *trial) renderAll(config json.RawMessage) ([]launch.Settings, error) {
	c, err := t.New(slices.Clone(config))
	if err != nil {
		return nil, err
	}
	r, ok := connector.As[launch.Renderer](c)
	if !ok {
		return nil, errors.New("it is no Renderer")
	}
	var list []launch.Settings
	for _, target := range t.targets() {
		set, err := r.Render(target)
		if err != nil {
			set = launch.Settings{Engine: err.Error()}
		}
		list = append(list, set)
	}
	return list, nil
}

func noted(list []launch.Settings, at string) bool {
	return slices.ContainsFunc(list, func(set launch.Settings) bool {
		return slices.ContainsFunc(set.Notes, func(n launch.Note) bool { return n.Path == at })
	})
}
