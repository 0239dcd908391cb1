// SPDX-License-Identifier: Apache-2.0

// Package names has the names by which connectors are found: their own, and the engines' class names, each of which
// stands for a connector or is refused with a reason. connector.Register adds to it, and connector.Open reads it.
package names

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/pdkit/pdkit/config"
)

// ErrUnknown says that no connector is registered under a name.
var ErrUnknown = errors.New("unknown connector")

var registry = struct {
	sync.RWMutex
	connectors []string
	chosen     map[string]func(json.RawMessage) string
	refused    map[string]string // the reason by the engine's class
}{chosen: map[string]func(json.RawMessage) string{}, refused: map[string]string{}}

// Add adds a connector's own name. connector.Register calls it.
func Add(name string) {
	registry.Lock()
	defer registry.Unlock()
	registry.connectors = append(registry.connectors, name)
}

// Connectors returns the registered connectors' own names, sorted: those whose packages the program imports.
func Connectors() []string {
	registry.RLock()
	defer registry.RUnlock()
	return slices.Sorted(slices.Values(registry.connectors))
}

// Register registers an engine's class name that stands for one or several connectors, depending on the settings
// (LMCacheConnectorV1 is a shared store or, with enable_pd, a transfer from engine to engine). choose returns the
// registered name. Register panics if the class is taken.
func Register(class string, choose func(config json.RawMessage) string) {
	registry.Lock()
	defer registry.Unlock()
	if _, taken := registry.chosen[class]; taken || class == "" || choose == nil {
		panic(fmt.Sprintf("connector: class name %q is empty, taken or without a connector", class))
	}
	registry.chosen[class] = choose
}

// Refuse says why no connector serves an engine's class, as "keeps KV in the engine's own memory". connector.Open's
// error for that class then has the reason in place of the known names.
func Refuse(class, why string) {
	registry.Lock()
	defer registry.Unlock()
	registry.refused[class] = why
}

// Refusal returns the reason that [Refuse] was given for a class, or "".
func Refusal(class string) string {
	registry.RLock()
	defer registry.RUnlock()
	return registry.refused[class]
}

// Resolve returns the connector's name for a type and its settings: for an engine's class name the connector that it
// stands for, for "" "http", and any other name unchanged.
func Resolve(typ string, config json.RawMessage) string {
	if typ == "" {
		return "http"
	}
	registry.RLock()
	choose := registry.chosen[typ]
	registry.RUnlock()
	if choose != nil {
		return choose(config)
	}
	return typ
}

// Suggest returns the remedy for an unknown type: the nearest name or class or, if none is near, the names of all
// connectors.
func Suggest(typ string) string {
	if near := config.Nearest(typ, append(Connectors(), Classes()...)); near != "" {
		return "did you mean " + near + "?"
	}
	return "known are " + strings.Join(Connectors(), ", ")
}

// Classes returns the engines' class names that stand for a connector, sorted.
func Classes() []string {
	registry.RLock()
	defer registry.RUnlock()
	return slices.Sorted(maps.Keys(registry.chosen))
}
