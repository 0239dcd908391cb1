// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/pdkit/pdkit/config"
)

// Factory makes a connector from its own settings (config.Spec.Config; empty means defaults). It must refuse unknown
// fields, which [config.Decode] does, and must not open sockets: that is [Starter]'s part.
type Factory func(config json.RawMessage) (KVConnector, error)

// registry is the SDK's only global state. A program can do without it, since every connector also has a constructor.
var registry = struct {
	sync.RWMutex
	factories map[string]Factory
	classes   map[string]func(json.RawMessage) string
	refused   map[string]string // the reason by the engine's class
}{factories: map[string]Factory{}, classes: map[string]func(json.RawMessage) string{}, refused: map[string]string{}}

// Register makes a connector available to [Open] under name, and under the engines' own class names for it
// (NixlConnector). It is meant for init functions and panics if name is empty or not lower case, f is nil, or a name is
// taken.
func Register(name string, f Factory, classes ...string) {
	registry.Lock()
	defer registry.Unlock()
	if name == "" || name != strings.ToLower(name) {
		panic(fmt.Sprintf("connector: Register needs a lower-case name, got %q", name))
	}
	if f == nil {
		panic("connector: Register of " + name + " needs a factory")
	}
	if _, taken := registry.factories[name]; taken {
		panic("connector: Register called twice for " + name)
	}
	registry.factories[name] = f
	for _, class := range classes {
		registerClass(class, func(json.RawMessage) string { return name })
	}
}

// RegisterClass registers an engine's class name that stands for several connectors, depending on the settings
// (LMCacheConnectorV1 is a shared store or, with enable_pd, a transfer from engine to engine). choose returns the
// registered name. RegisterClass panics as [Register] does.
func RegisterClass(class string, choose func(config json.RawMessage) string) {
	registry.Lock()
	defer registry.Unlock()
	registerClass(class, choose)
}

func registerClass(class string, choose func(json.RawMessage) string) {
	if _, taken := registry.classes[class]; taken || class == "" || choose == nil {
		panic(fmt.Sprintf("connector: class name %q is empty, taken or without a connector", class))
	}
	registry.classes[class] = choose
}

// RefuseClass says why no connector serves an engine's class, as "keeps KV in the engine's own memory". [Open]'s error
// for that class then has the reason in place of the known names.
func RefuseClass(class, why string) {
	registry.Lock()
	defer registry.Unlock()
	registry.refused[class] = why
}

// ClassRefusal returns the reason that [RefuseClass] was given for a class, or "".
func ClassRefusal(class string) string {
	registry.RLock()
	defer registry.RUnlock()
	return registry.refused[class]
}

// Open makes the connector that a spec names by its registered name or by an engine's class name. An empty type is
// "http". For an unknown name the error is [ErrUnknown] and lists the known names: those whose packages the program
// imports; package connector/all imports all.
func Open(spec config.Spec) (KVConnector, error) {
	name := Resolve(spec.Type, spec.Config)
	registry.RLock()
	f := registry.factories[name]
	registry.RUnlock()
	if why := ClassRefusal(spec.Type); f == nil && why != "" {
		return nil, fmt.Errorf("%w %.64q: it %s", ErrUnknown, spec.Type, why)
	}
	if f == nil {
		known := append(Names(), Classes()...)
		remedy := ""
		if near := config.Nearest(spec.Type, known); near != "" {
			remedy = "; did you mean " + near + "?"
		}
		return nil, fmt.Errorf("%w %.64q%s registered are %s",
			ErrUnknown, cmp.Or(spec.Type, name), cmp.Or(remedy, ":"), strings.Join(known, ", "))
	}
	return f(spec.Config)
}

// Resolve returns the connector's name for a type and its settings: for an engine's class name the connector that it
// stands for, for "" "http", and any other name unchanged.
func Resolve(typ string, config json.RawMessage) string {
	if typ == "" {
		return "http"
	}
	registry.RLock()
	choose := registry.classes[typ]
	registry.RUnlock()
	if choose != nil {
		return choose(config)
	}
	return typ
}

// Classes returns the engines' class names that stand for a connector, sorted.
func Classes() []string {
	registry.RLock()
	defer registry.RUnlock()
	return slices.Sorted(maps.Keys(registry.classes))
}

// Names returns the registered names, sorted.
func Names() []string {
	registry.RLock()
	defer registry.RUnlock()
	return slices.Sorted(maps.Keys(registry.factories))
}
