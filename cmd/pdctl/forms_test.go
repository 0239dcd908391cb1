// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
)

// exact is a connector whose settings contain every character with a meaning in a shell, YAML, Compose or Kubernetes.
type exact struct{ connector.KVConnector }

func (exact) Traits() connector.Traits { return connector.Traits{Name: "exact"} }

const everything = "it's \"$HOME\" $(HOME) $$(X) ${X:-1} $$$ `id` \\n %s # {{.}} [a]: &b *c !d | > ~ \n\ttab é " +
	"\x7f end "

func init() { launch.Register("exact", renderExact) }

func renderExact(_ connector.KVConnector, _ json.RawMessage, t launch.Target) (launch.Settings, error) {
	return launch.Settings{
		Engine: "vllm", KVTransfer: &launch.KVTransfer{Connector: "C", Role: launch.KVRole(t.Endpoint.Role),
			Extra: map[string]any{"t": everything}},
		Args: []string{"--text", everything, "--empty=", "--yes", "true", "--no", "null", "--zero", "0123", "--date",
			"2026-01-01"},
		Env: []launch.EnvVar{{Name: "ALL", Value: everything}, {Name: "EMPTY", Value: ""},
			{Name: "YES", Value: "yes"}, {Name: "OCTAL", Value: "010"}},
		Files: []launch.File{{Name: "a.yaml", Content: "k: \"$X\" # 'y'\n\nend: $(POD_IP)\n"},
			{Name: "b", Content: everything}},
	}, nil
}

func (exact) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

// A YAML parser reads each form, and the form's own program's rules for dollar signs are applied. The engine then gets
// exactly its settings.
func TestEachFormCarriesEveryCharacter(t *testing.T) {
	p, err := endpoint("http://10.0.0.1:8100", "prefill", nil)
	require.NoError(t, err)
	d, err := endpoint("http://10.0.0.2:8200", "decode", nil)
	require.NoError(t, err)
	plan, err := launch.With(exact{}, launch.Deployment{Endpoints: []discovery.Endpoint{p, d}, Model: "m"})
	require.NoError(t, err)
	want, err := renderExact(nil, nil, plan.Engines[0].Target)
	require.NoError(t, err)
	python, err := plan.Python()
	require.NoError(t, err)
	for name, text := range map[string][]byte{"launch.sh": plan.Shell(), "compose.yaml": plan.Compose(),
		"pods.yaml": plan.Kubernetes(), "launch.py": python} {
		t.Run(name, func(t *testing.T) {
			list, err := readInput(name, text)
			require.NoError(t, err)
			var engine *launched
			for i := range list {
				if list[i].env["ALL"] != "" && engine == nil && hasRole(list[i].argv, "kv_producer") {
					engine = &list[i]
				}
			}
			require.NotNil(t, engine)
			argv := engine.argv[len(engine.argv)-len(want.Args):]
			assert.Equal(t, want.Args, argv)
			var transfer struct {
				Extra map[string]string `json:"kv_connector_extra_config"`
			}
			require.NoError(t, json.Unmarshal([]byte(engine.argv[len(engine.argv)-len(want.Args)-1]), &transfer))
			assert.Equal(t, everything, transfer.Extra["t"])
			for _, v := range want.Env {
				got, set := engine.env[v.Name]
				assert.True(t, set, v.Name)
				assert.Equal(t, v.Value, got, v.Name)
			}
			for _, f := range want.Files {
				path := "/etc/pdkit/" + f.Name
				if strings.HasPrefix(name, "launch.") {
					path = f.Name
				}
				content, err := engine.read(path)
				require.NoError(t, err, f.Name)
				if name == "launch.sh" && f.Name == "b" { // a here-document ends with a line break
					content = content[:len(content)-1]
				}
				assert.Equal(t, f.Content, string(content), f.Name)
			}
		})
	}
}

func TestJSONCarriesEveryCharacter(t *testing.T) {
	p, err := endpoint("http://10.0.0.1:8100", "prefill", nil)
	require.NoError(t, err)
	plan, err := launch.With(exact{}, launch.Deployment{Endpoints: []discovery.Endpoint{p}, Model: "m"})
	require.NoError(t, err)
	want := plan.Engines[0].Settings
	text, err := plan.JSON()
	require.NoError(t, err)
	var got struct {
		Name     string
		Programs []struct {
			Name       string
			Argv       []string
			Env, Files map[string]string
		}
	}
	require.NoError(t, json.Unmarshal(text, &got))
	require.Len(t, got.Programs, 1)
	program := got.Programs[0]
	assert.Equal(t, "m prefill-0 vllm", got.Name+" "+program.Name+" "+program.Argv[0])
	assert.Equal(t, want.Args, program.Argv[len(program.Argv)-len(want.Args):])
	assert.Len(t, program.Env, len(want.Env))
	for _, v := range want.Env {
		assert.Equal(t, v.Value, program.Env[v.Name])
	}
	assert.Len(t, program.Files, len(want.Files))
	for _, f := range want.Files {
		assert.Equal(t, f.Content, program.Files[f.Name])
	}
}

func hasRole(argv []string, role string) bool {
	e, ok, err := launched{argv: argv}.parse(launch.Version{})
	return err == nil && ok && e.Transfer != nil && e.Transfer.Role == role
}
