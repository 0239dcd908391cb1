// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

// rules are the rules that the settings of each connector keep. settings are all that the connector can have, each
// other than its default.
type rules struct {
	name, settings  string
	prefill, decode []string         // the engines' attributes
	own             []string         // paths (a.b) of pdkit's own settings
	versions        []launch.Version // besides the newest

	how func(settings string, t launch.Target) (launch.Settings, error) // nil: with the registered function
}

func TestTheSettingsAreCompleteConstantAndNameEverySetting(t *testing.T) {
	tested := map[string]bool{}
	for _, r := range everyConnector {
		tested[r.name] = true
		t.Run(r.name, func(t *testing.T) { require.NoError(t, r.check()) })
	}
	for _, name := range names.Connectors() {
		assert.True(t, tested[name], "everyConnector lacks %s", name)
	}
}

func (r *rules) render(settings string, target launch.Target) (launch.Settings, error) {
	if r.how != nil {
		return r.how(settings, target)
	}
	c, err := connector.Open(config.Spec{Type: r.name, Config: json.RawMessage(settings)})
	if err != nil {
		return launch.Settings{}, err
	}
	return launch.Render(c, json.RawMessage(settings), target)
}

// targets are the engines whose settings are rendered: each role, for the newest version and those of the rules.
func (r *rules) targets() []launch.Target {
	at := func(url string, role discovery.Role, attributes []string) discovery.Endpoint {
		e, err := discovery.New(url, role)
		if err != nil {
			panic(err)
		}
		e.Attributes = map[string]string{}
		for i := 0; i+1 < len(attributes); i += 2 {
			e.Attributes[attributes[i]] = attributes[i+1]
		}
		return e
	}
	engines := []discovery.Endpoint{at("http://prefill.example:8100", discovery.RolePrefill, r.prefill),
		at("http://decode.example:8200", discovery.RoleDecode, r.decode)}
	both := at("http://both.example:8100", discovery.RoleBoth, r.prefill)
	var list []launch.Target
	for _, v := range append([]launch.Version{{}}, r.versions...) {
		for _, e := range append(slices.Clone(engines), both) {
			all := engines
			if e.ID == both.ID {
				all = []discovery.Endpoint{both}
			}
			for _, cpu := range []bool{false, true} {
				list = append(list, launch.Target{Endpoint: e, Engines: all, Model: "some/model", Version: v, CPU: cpu,
					Gateway: "gateway.example"})
			}
		}
	}
	return list
}

func (r *rules) check() error {
	rendered := false
	var refused error
	for _, target := range r.targets() {
		what := fmt.Sprintf("%s, version %q", target.Endpoint.Role, target.Version)
		before := snapshot(target)
		set, err := r.render(r.settings, target)
		if err != nil {
			refused = fmt.Errorf("%s: %w", what, err)
			if target.Endpoint.Role == discovery.RoleBoth || target.Version != (launch.Version{}) || target.CPU {
				continue // a protocol may know no such engine
			}
			return refused
		}
		rendered = true
		for range 3 {
			again, err := r.render(r.settings, target)
			if err != nil || !reflect.DeepEqual(again, set) {
				return fmt.Errorf("%s: the settings are not the same twice", what)
			}
		}
		if snapshot(target) != before {
			return fmt.Errorf("%s: rendering changed the target", what)
		}
		if err := checkSettings(set); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if !rendered {
		return refused
	}
	if err := r.namesResources(); err != nil {
		return err
	}
	return r.namesInner(r.renderAll(r.settings), gjson.Parse(r.settings), "", "config")
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
		if !strings.HasPrefix(kv.JSON(), "{") || !json.Valid([]byte(kv.JSON())) {
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

// namesResources checks that a note says of each of a ModelServer's resources which setting it became, or that it has
// no effect.
func (r *rules) namesResources() error {
	for _, target := range r.targets() {
		if target.Endpoint.Role == discovery.RoleBoth || target.Version != (launch.Version{}) || target.CPU {
			continue
		}
		target.Resources = config.Resources{MaxMemory: "8Gi", MaxDisk: "100Gi", MaxBandwidth: "10Gi"}
		set, err := r.render(r.settings, target)
		if err != nil {
			return err
		}
		for _, path := range []string{"resources.maxMemory", "resources.maxDisk", "resources.maxBandwidth"} {
			if !noted([]launch.Settings{set}, path) {
				return fmt.Errorf("%s: no note names %s", target.Endpoint.Role, path)
			}
		}
	}
	return nil
}

// namesInner checks that each setting of an object, those inside others too, either changes what is rendered or is
// named by a note. at is the object's path for gjson, shown its path for notes.
func (r *rules) namesInner(full []launch.Settings, object gjson.Result, at, shown string) (fault error) {
	object.ForEach(func(key, value gjson.Result) bool {
		inner, note := strings.TrimPrefix(at+"."+gjson.Escape(key.Str), "."), config.FieldPath(shown, key.Str)
		switch {
		case slices.Contains(r.own, strings.TrimPrefix(note, "config.")), noted(full, note):
		case value.IsObject() && value.Raw != "{}":
			fault = r.namesInner(full, value, inner, note)
		default:
			fault = r.changes(full, inner, note)
		}
		return fault == nil
	})
	return fault
}

func (r *rules) changes(full []launch.Settings, at, note string) error {
	without, err := sjson.Delete(r.settings, at)
	if err != nil {
		return err
	}
	if reflect.DeepEqual(full, r.renderAll(without)) {
		return fmt.Errorf("the setting %s changes nothing that is rendered, and no note has it as its Path", note)
	}
	return nil
}

func (r *rules) renderAll(settings string) []launch.Settings {
	var list []launch.Settings
	for _, target := range r.targets() {
		set, err := r.render(settings, target)
		if err != nil {
			set = launch.Settings{Engine: err.Error()}
		}
		list = append(list, set)
	}
	return list
}

func noted(list []launch.Settings, at string) bool {
	return slices.ContainsFunc(list, func(set launch.Settings) bool {
		return slices.ContainsFunc(set.Notes, func(n launch.Note) bool { return n.Path == at })
	})
}

// toy renders a connector that keeps all rules.
func toy(settings string, target launch.Target) (launch.Settings, error) {
	var o struct {
		BlockSize    int              `json:"blockSize"`
		PollInterval *config.Duration `json:"pollInterval"`
		Link         struct {
			Speed  int    `json:"speed"`
			Device string `json:"device"`
		} `json:"link"`
	}
	if err := config.Decode([]byte(settings), &o); err != nil {
		return launch.Settings{}, err
	}
	set := launch.Settings{Engine: "vllm", KVTransfer: &launch.KVTransfer{Connector: "ToyConnector",
		Role: launch.KVRole(target.Endpoint.Role)}, Notes: launch.NoLimits(target.Resources, "the toy has none")}
	if o.BlockSize > 0 {
		set.Args = append(set.Args, "--block-size", strconv.Itoa(o.BlockSize))
	}
	if o.Link.Speed > 0 {
		set.Args = append(set.Args, "--link-speed", strconv.Itoa(o.Link.Speed))
	}
	if o.Link.Device != "" {
		set.Env = append(set.Env, launch.EnvVar{Name: "TOY_DEVICE", Value: o.Link.Device})
	}
	if o.PollInterval != nil {
		set.Notes = append(set.Notes, launch.NoEffect("config.pollInterval", "the toy engine does not poll"))
	}
	return set, nil
}

func TestEachRuleFailsForWrongSettings(t *testing.T) {
	right := rules{name: "toy", how: toy,
		settings: `{"blockSize":32,"pollInterval":"50ms","link":{"speed":100,"device":"eth7"}}`}
	require.NoError(t, right.check())
	calls := 0
	for what, wrong := range map[string]struct {
		alter func(t launch.Target, set *launch.Settings) error
		says  string
	}{
		"drops a setting in silence": {func(t launch.Target, set *launch.Settings) error {
			set.Notes = launch.NoLimits(t.Resources, "the toy has none")
			return nil
		}, "config.pollInterval changes nothing"},
		"drops a setting within a setting": {func(_ launch.Target, set *launch.Settings) error {
			set.Env = nil
			return nil
		}, "config.link.device changes nothing"},
		"drops a resource in silence": {func(_ launch.Target, set *launch.Settings) error {
			set.Notes = slices.DeleteFunc(set.Notes, func(n launch.Note) bool { return n.Path == "resources.maxDisk" })
			return nil
		}, "no note names resources.maxDisk"},
		"knows no engine": {func(_ launch.Target, set *launch.Settings) error {
			set.Engine = ""
			return nil
		}, "its Engine is"},
		"knows no role": {func(_ launch.Target, set *launch.Settings) error {
			set.KVTransfer.Role = "producer"
			return nil
		}, "KVTransfer.Role"},
		"writes what is no JSON": {func(_ launch.Target, set *launch.Settings) error {
			set.KVTransfer.Extra = map[string]any{"a": math.Inf(1)}
			return nil
		}, "KVTransfer has no JSON"},
		"names a file with a folder": {func(_ launch.Target, set *launch.Settings) error {
			set.Files = []launch.File{{Name: "../toy.yaml", Content: "a: 1"}}
			return nil
		}, "folder in its name"},
		"writes into its target": {func(t launch.Target, _ *launch.Settings) error {
			t.Endpoint.Attributes["rendered"] = "yes"
			return nil
		}, "changed the target"},
		"renders something else each time": {func(_ launch.Target, set *launch.Settings) error {
			calls++
			set.Args = append(set.Args, "--seed="+strconv.Itoa(calls))
			return nil
		}, "not the same twice"},
		"does not render": {func(launch.Target, *launch.Settings) error { return names.ErrUnknown },
			names.ErrUnknown.Error()},
	} {
		r := right
		r.how = func(settings string, t launch.Target) (launch.Settings, error) {
			set, err := toy(settings, t)
			return set, errors.Join(err, wrong.alter(t, &set))
		}
		assert.ErrorContains(t, r.check(), wrong.says, what)
	}
	right.own = []string{"pollInterval"}
	right.how = func(settings string, t launch.Target) (launch.Settings, error) {
		set, err := toy(settings, t)
		set.Notes = launch.NoLimits(t.Resources, "the toy has none")
		return set, err
	}
	require.NoError(t, right.check(), "pdkit's own setting")
}
