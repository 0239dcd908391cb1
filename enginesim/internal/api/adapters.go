// SPDX-License-Identifier: Apache-2.0

package api

import (
	"maps"
	"net/http"
	"slices"
	"sync"
)

// Adapters are the LoRA adapters that an engine has loaded. They are lost when the engine restarts, but for those that
// it is launched with.
type Adapters struct {
	mu     sync.Mutex
	loaded map[string]bool
}

// NewAdapters has those that an engine is launched with.
func NewAdapters(names []string) *Adapters {
	a := &Adapters{loaded: map[string]bool{}}
	for _, name := range names {
		a.loaded[name] = true
	}
	return a
}

// Set loads or unloads an adapter, and reports whether that changed anything.
func (a *Adapters) Set(name string, loaded bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.loaded[name] == loaded {
		return false
	}
	if loaded {
		a.loaded[name] = true
	} else {
		delete(a.loaded, name)
	}
	return true
}

func (a *Adapters) has(name string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.loaded[name]
}

func (a *Adapters) names() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.loaded))
}

// loadAdapter and unloadAdapter are what vLLM serves with VLLM_ALLOW_RUNTIME_LORA_UPDATING
// (vllm/entrypoints/serve/lora/api_router.py).
func loadAdapter(e *Engine, _ *http.Request, body []byte) (any, *Error) {
	return setAdapter(e, body, true, "added")
}

func unloadAdapter(e *Engine, _ *http.Request, body []byte) (any, *Error) {
	return setAdapter(e, body, false, "removed")
}

func setAdapter(e *Engine, body []byte, loaded bool, done string) (any, *Error) {
	var q struct {
		Name string `json:"lora_name"`
	}
	if bad := DecodeBody(body, &q); bad != nil {
		return nil, bad
	}
	switch {
	case q.Name == "":
		return nil, BadRequest("lora_name", "'lora_name' needs to be provided to load or unload a LoRA adapter.")
	case !e.Adapters.Set(q.Name, loaded) && loaded:
		return nil, BadRequest("", "The lora adapter '%s' has already been loaded.", q.Name)
	}
	return "Success: LoRA adapter '" + q.Name + "' " + done + " successfully.", nil
}
