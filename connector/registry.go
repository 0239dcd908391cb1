// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"
	"sync"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/names"
)

// registry and package names are the SDK's only global state. A program can do without them, since every connector
// also has a constructor.
var registry = struct {
	sync.RWMutex
	factories map[string]func(json.RawMessage) (KVConnector, error)
}{factories: map[string]func(json.RawMessage) (KVConnector, error){}}

// Register makes a connector available to [Open] under name, and under the engines' own class names for it
// (NixlConnector). It is meant for init functions and panics if name is empty or not lower case, open is nil, or a name
// is taken.
//
// open makes a connector from its own settings (config.Spec.Config; empty means defaults). It must refuse unknown
// fields, which [config.Decode] does, and must not open sockets: that is [Starter]'s part.
func Register(name string, open func(settings json.RawMessage) (KVConnector, error), classNames ...string) {
	registry.Lock()
	defer registry.Unlock()
	if name == "" || name != strings.ToLower(name) {
		panic(fmt.Sprintf("connector: Register needs a lower-case name, got %q", name))
	}
	if open == nil {
		panic("connector: Register of " + name + " needs a function that makes it")
	}
	if _, taken := registry.factories[name]; taken {
		panic("connector: Register called twice for " + name)
	}
	registry.factories[name] = open
	names.Add(name)
	for _, class := range classNames {
		names.Register(class, func(json.RawMessage) string { return name })
	}
}

// Open makes the connector that a spec names by its registered name or by an engine's class name. An empty type is
// "http". For an unknown name the error is [names.ErrUnknown] and names the nearest one of those whose packages the
// program imports, or lists them; package connector/all imports all.
func Open(spec config.Spec) (KVConnector, error) {
	name := names.Resolve(spec.Type, spec.Config)
	registry.RLock()
	f := registry.factories[name]
	registry.RUnlock()
	if why := names.Refusal(spec.Type); f == nil && why != "" {
		return nil, fmt.Errorf("%w %.64q: it %s", names.ErrUnknown, spec.Type, why)
	}
	if f == nil {
		return nil, fmt.Errorf("%w %.64q; %s", names.ErrUnknown, cmp.Or(spec.Type, name), names.Suggest(spec.Type))
	}
	return f(spec.Config)
}
