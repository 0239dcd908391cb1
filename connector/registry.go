// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
)

// Factory makes a connector from its own settings (Spec.Config; empty means defaults). It must refuse unknown fields,
// which [DecodeConfig] does, and must not open sockets: that is [Starter]'s part.
type Factory func(config json.RawMessage) (KVConnector, error)

// registry is the only global state of the SDK. Nobody needs it: every connector also has a constructor.
var registry = struct {
	sync.RWMutex
	factories map[string]Factory
	classes   map[string]string
}{factories: map[string]Factory{}, classes: map[string]string{}}

// Register makes a connector available to [Open] under name, and under the engines' own class names for it
// (NixlConnector). It is meant for init functions and panics if name is empty or not lower case, f is nil, or a name is taken.
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
		if _, taken := registry.classes[class]; taken || class == "" {
			panic(fmt.Sprintf("connector: class name %q of %s is empty or taken", class, name))
		}
		registry.classes[class] = name
	}
}

// Open makes the connector that a spec names, by its registered name or an engine's class name. An empty type is "http". The
// error of an unknown name is [ErrUnknown] and lists the known ones.
func Open(spec Spec) (KVConnector, error) {
	name := Resolve(spec.Type)
	registry.RLock()
	f := registry.factories[name]
	registry.RUnlock()
	if f == nil {
		return nil, fmt.Errorf("%w %q: registered are %s", ErrUnknown, spec.Type, strings.Join(Names(), ", "))
	}
	return f(spec.Config)
}

// Resolve returns the connector name for an engine's class name, "http" for "", and any other name as it is.
func Resolve(typ string) string {
	if typ == "" {
		return "http"
	}
	registry.RLock()
	defer registry.RUnlock()
	if name, ok := registry.classes[typ]; ok {
		return name
	}
	return typ
}

// Names returns the registered names, sorted.
func Names() []string {
	registry.RLock()
	defer registry.RUnlock()
	return slices.Sorted(maps.Keys(registry.factories))
}
