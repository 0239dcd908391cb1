// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/launcher"
	"github.com/pdkit/pdkit/discovery"
)

// ErrNoSettings is the error for a connector that is not registered here and is no [Launcher].
var ErrNoSettings = errors.New("the connector has no launch settings")

// Func renders the settings of one engine. c is the connector, and settings are those that it was made of. It returns
// the same settings for the same target, does not dial and reads no files. Its error says which of the target's values
// cannot be rendered. A setting without effect is a note, not an error.
type Func func(c connector.KVConnector, settings json.RawMessage, t Target) (Settings, error)

// renderers are the functions by the connector's name (Traits). It is filled in an init function, since some of the
// functions look here for other connectors.
var renderers map[string]Func

func init() {
	renderers = map[string]Func{
		"ascend-layerwise": with(renderAscendLayerwise),
		"ascend-store":     with(renderSilentStore),
		"flexkv":           with(renderSilentStore),
		"hf3fs":            with(renderSilentStore),
		"http":             with(renderHTTP),
		"kvbm":             of(renderKVBM),
		"lmcache":          of(renderLMCache),
		"lmcache-pd":       of(renderLMCachePD),
		"mooncake":         with(renderMooncake),
		"mooncake-ascend":  with(renderMooncakeAscend),
		"mooncake-hybrid":  with(renderMooncakeAscend),
		"mooncake-store":   with(renderMooncakeStore),
		"moriio":           with(renderMoRIIO),
		"multi":            of(renderMulti),
		"nixl":             with(renderNixl),
		"nixl-push":        renderNixlPush,
		"offload-p2p":      with(renderOffload),
		"p2pnccl":          with(renderP2pNccl),
		"pynccl":           with(renderPyNccl),
		"relay":            with(renderRelay),
		"sglang":           with(renderSGLang),
		"sharedstorage":    with(renderSharedStorage),
		"tpu":              with(renderTPU),
		"trtllm":           with(renderTRTLLM),
		"ucm":              with(renderSilentStore),
	}
}

// Register sets the function for connectors of a name. It is meant for init functions, and panics if the name is taken.
func Register(name string, f Func) {
	if renderers[name] != nil {
		panic("launch: Register called twice for " + name)
	}
	renderers[name] = f
}

// Render returns the settings of one engine. c was made of settings, a config.Spec's Config. The error is
// [ErrNoSettings], or it says which of the target's values cannot be rendered.
func Render(c connector.KVConnector, settings json.RawMessage, t Target) (Settings, error) {
	f := rendererOf(c)
	if f == nil {
		return Settings{}, fmt.Errorf("connector %s: %w", c.Traits().Name, ErrNoSettings)
	}
	return f(c, settings, t)
}

// rendererOf returns nil for a connector without launch settings.
func rendererOf(c connector.KVConnector) Func {
	if _, ok := c.(*epd.Connector); ok {
		return renderEncodeStage
	}
	if f := renderers[c.Traits().Name]; f != nil {
		return f
	}
	if _, ok := connector.As[launcher.Launcher](c); ok {
		return renderLauncher
	}
	return nil
}

// renderLauncher asks the connector itself.
func renderLauncher(c connector.KVConnector, _ json.RawMessage, t Target) (Settings, error) {
	l, ok := connector.As[launcher.Launcher](c)
	if !ok {
		return Settings{}, ErrNoSettings
	}
	own, err := l.LaunchSettings(t.Endpoint)
	if err != nil {
		return Settings{}, err
	}
	s := Settings{Engine: own.Engine, Args: own.Args}
	if s.Engine == "" {
		s.Engine = "vllm"
	}
	for _, name := range slices.Sorted(maps.Keys(own.Env)) {
		s.Env = append(s.Env, EnvVar{Name: name, Value: own.Env[name]})
	}
	if own.KVTransfer != nil {
		s.KVTransfer = &KVTransfer{}
		if err := config.Decode(own.KVTransfer, s.KVTransfer); err != nil {
			return Settings{}, config.Within("kv_transfer_config", err)
		}
	}
	return s, nil
}

// with decodes a connector's settings for a function.
func with[O any](render func(connector.KVConnector, *O, Target) (Settings, error)) Func {
	return func(c connector.KVConnector, settings json.RawMessage, t Target) (Settings, error) {
		var o O
		if err := config.Decode(settings, &o); err != nil {
			return Settings{}, config.Within("config", err)
		}
		return render(c, &o, t)
	}
}

// of finds the connector itself for a function, which has its settings already.
func of[C any](render func(C, Target) (Settings, error)) Func {
	return func(k connector.KVConnector, _ json.RawMessage, t Target) (Settings, error) {
		c, ok := connector.As[C](k)
		if !ok {
			return Settings{}, ErrNoSettings
		}
		return render(c, t)
	}
}

// checkEndpoint asks the connector what is malformed in an engine's entry.
func checkEndpoint(c connector.KVConnector, e discovery.Endpoint) error {
	if own, ok := connector.As[connector.EndpointChecker](c); ok {
		return own.CheckEndpoint(e)
	}
	return nil
}

// loopback reports whether a host is this machine's own name or address.
func loopback(host string) bool {
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return strings.EqualFold(host, "localhost") || err == nil && ip.IsLoopback()
}
