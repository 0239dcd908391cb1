// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	_ "github.com/pdkit/pdkit/connector/all"
	"github.com/pdkit/pdkit/discovery"
)

// opened is a connector with the settings that it was made of.
type opened struct {
	connector.KVConnector
	settings json.RawMessage
}

func open(t testing.TB, name, settings string) opened {
	t.Helper()
	c, err := connector.Open(config.Spec{Type: name, Config: json.RawMessage(settings)})
	require.NoError(t, err)
	return opened{c, json.RawMessage(settings)}
}

func (o opened) Render(target launch.Target) (launch.Settings, error) {
	return launch.Render(o.KVConnector, o.settings, target)
}

func render(t testing.TB, name, settings string, target launch.Target) launch.Settings {
	t.Helper()
	s, err := open(t, name, settings).Render(target)
	require.NoError(t, err)
	return s
}

// engine makes an engine with attributes: a name, its value, and so on.
func engine(t testing.TB, url string, role discovery.Role, attributes ...string) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New(url, role)
	require.NoError(t, err)
	e.Attributes = map[string]string{}
	for i := 0; i+1 < len(attributes); i += 2 {
		e.Attributes[attributes[i]] = attributes[i+1]
	}
	return e
}

func env(s launch.Settings, name string) string {
	for _, e := range s.Env {
		if e.Name == name {
			return e.Value
		}
	}
	return ""
}

// idle are the paths of the settings without effect.
func idle(s launch.Settings) (paths []string) {
	for _, n := range s.Notes {
		if n.NoEffect {
			paths = append(paths, n.Path)
		}
	}
	return paths
}
