// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

var update = flag.Bool("update", false, "write the golden files anew")

// rendering is a connector whose settings a test chooses.
type rendering struct {
	render func(launch.Target) (launch.Settings, error)
}

func (rendering) Traits() connector.Traits { return connector.Traits{Name: "test"} }
func (rendering) Prefill(context.Context, *connector.Session, *connector.Leg) error {
	return nil
}

func (rendering) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

func init() {
	launch.Register("test", func(c connector.KVConnector, _ json.RawMessage, t launch.Target) (launch.Settings, error) {
		return c.(rendering).render(t)
	})
}

// silent is a connector without settings.
type silent struct{ connector.KVConnector }

func (silent) Traits() connector.Traits { return connector.Traits{Name: "silent"} }

// nasty is a text that each form must carry as it is.
const nasty = "it's \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two é ' end"

// nastySettings use every part of EngineSettings, and texts with every character that means something somewhere.
func nastySettings(t launch.Target) (launch.Settings, error) {
	file := "conf-" + t.Endpoint.Role.String() + ".yaml"
	return launch.Settings{
		Engine: "vllm",
		KVTransfer: &launch.KVTransfer{
			Connector: "TestConnector", Role: launch.KVRole(t.Endpoint.Role), EngineID: "id's", BufferSize: 8e9,
			Port: 21001,
			Extra: map[string]any{"text": nasty, "file": file, "list": []string{"a", "b"},
				"deep": map[string]any{"n": 1, "f": 0.5, "yes": true, "none": nil}},
		},
		Args: []string{"--block-size", "32", "--enable-prompt-tokens-details", "--hf-overrides", `{"a": "it's"}`,
			"--text=" + nasty, "--no-flag"},
		Env: []launch.EnvVar{{Name: "LMCACHE_CONFIG_FILE", Value: file}, {Name: "NASTY", Value: nasty},
			{Name: "EMPTY", Value: ""}},
		Files: []launch.File{
			{Name: file, Content: "# $HOME 'x'\nkey: \"v\"\nEND\n"},
			{Name: "raw-" + file, Content: "  indented\n\ttab " + nasty},
		},
		Companions: []launch.Companion{
			{Name: "master", Command: []string{"cache master", "--path", nasty}},
			{Name: "agent", Command: []string{"agent", "--config", file}, PerEngine: true},
		},
		Notes: []launch.Note{
			{NoEffect: true, Path: "config.x", Text: "the engine has no such\nsetting"},
			{Path: "role", Text: t.Endpoint.Role.String()},
		},
	}, nil
}

func endpoints(t *testing.T, prefill, decode string) []discovery.Endpoint {
	t.Helper()
	p, err := discovery.New(prefill, discovery.RolePrefill)
	require.NoError(t, err)
	d, err := discovery.New(decode, discovery.RoleDecode)
	require.NoError(t, err)
	return []discovery.Endpoint{p, d}
}

func nastyPlan(t *testing.T) *launch.Plan {
	t.Helper()
	p, err := launch.With(rendering{nastySettings}, launch.Deployment{
		Endpoints: endpoints(t, "http://10.0.0.1:8100", "http://10.0.0.2:8200"), Model: "Org/Llama 2's",
		Path: "/models/llama 2", Version: launch.Version{Minor: 32},
	})
	require.NoError(t, err)
	return p
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(file, got, 0o600))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, string(want), string(got))
}

func TestEachFormIsWrittenAsItWas(t *testing.T) {
	p := nastyPlan(t)
	golden(t, "nasty.sh", p.Shell())
	golden(t, "nasty.compose.yaml", p.Compose())
	golden(t, "nasty.kubernetes.yaml", p.Kubernetes())
	python, err := p.Python()
	require.NoError(t, err)
	golden(t, "nasty.py", python)

	again := nastyPlan(t)
	assert.Equal(t, p.Shell(), again.Shell(), "the same plan gives the same bytes")
	assert.Equal(t, p.Kubernetes(), again.Kubernetes())
}

// program finds an interpreter. On a build machine a missing one is a fault: nothing would be tested.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if os.Getenv("CI") != "" {
			require.NoError(t, err, "CI must have "+name)
		}
		t.Skip("needs " + name + ", which this machine does not have")
	}
	return path
}

func runIn(t *testing.T, dir string, argv ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "HOME=/expanded")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// The script is run, with a program in vllm's place that writes what it was given.
func TestTheShellScriptGivesTheEngineExactlyItsSettings(t *testing.T) {
	sh, dir := program(t, "sh"), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "launch.sh"), nastyPlan(t).Shell(), 0o600))
	for _, name := range []string{"vllm", "agent", "cache master"} {
		require.NoError(
			t, os.WriteFile(filepath.Join(dir, name),
				[]byte("#!/bin/sh\nprintf '%s\\0' \"$NASTY\" \"${EMPTY-unset}\" \"$@\"\n"), 0o700),
		)
	}
	runIn(t, dir, sh, "-n", "launch.sh")

	out := strings.Split(runIn(t, dir, sh, "launch.sh", "prefill-0", "--more", "a b"), "\x00")
	want, _ := nastySettings(nastyPlan(t).Engines[0].Target)
	assert.Equal(t, nasty, out[0], "variables arrive as they are")
	assert.Empty(t, out[1], "an empty one is set")
	argv := append(
		[]string{"serve", "/models/llama 2", "--served-model-name", "Org/Llama 2's", "--host", "10.0.0.1", "--port",
			"8100", "--kv-transfer-config", want.KVTransfer.JSON()}, want.Args...,
	)
	assert.Equal(t, append(argv, "--more", "a b", ""), out[2:], "arguments arrive as they are, the caller's last")
	for _, f := range want.Files {
		content, err := os.ReadFile(filepath.Join(dir, f.Name))
		require.NoError(t, err)
		assert.Equal(t, strings.TrimSuffix(f.Content, "\n")+"\n", string(content))
	}
	assert.Equal(t, []string{"--config", "conf-decode.yaml"},
		strings.Split(runIn(t, dir, sh, "launch.sh", "decode-0-agent"), "\x00")[2:4])
	assert.Equal(t, []string{"--path", nasty}, strings.Split(runIn(t, dir, sh, "launch.sh", "master"), "\x00")[2:4])
	assert.Error(t, exec.CommandContext(t.Context(), sh, filepath.Join(dir, "launch.sh"), "unknown").Run())
}

// The module is run, with a package in vllm's place that writes what it was given.
func TestThePythonModuleGivesTheEngineExactlyItsSettings(t *testing.T) {
	python, dir := program(t, "python3"), t.TempDir()
	text, err := nastyPlan(t).Python()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "launch.py"), text, 0o600))
	runIn(t, dir, python, "-m", "py_compile", "launch.py")
	for name, content := range map[string]string{
		"__init__.py": "import json, os\ndef LLM(**kw):\n    print(json.dumps({'kw': kw, 'nasty': " +
			"os.environ['NASTY']}))\n",
		"config.py": "def KVTransferConfig(**kw):\n    return kw\n",
	} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "vllm"), 0o750))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "vllm", name), []byte(content), 0o600))
	}
	var got struct {
		KW    map[string]json.RawMessage `json:"kw"`
		Nasty string                     `json:"nasty"`
	}
	require.NoError(t, json.Unmarshal([]byte(runIn(t, dir, python, "launch.py", "decode-0")), &got))
	want, _ := nastySettings(nastyPlan(t).Engines[1].Target)
	assert.Equal(t, nasty, got.Nasty)
	assert.JSONEq(t, want.KVTransfer.JSON(), string(got.KW["kv_transfer_config"]))
	assert.JSONEq(t, `"/models/llama 2"`, string(got.KW["model"]))
	assert.JSONEq(t, "32", string(got.KW["block_size"]))
	assert.JSONEq(t, `{"a": "it's"}`, string(got.KW["hf_overrides"]))
	assert.JSONEq(t, "false", string(got.KW["flag"]), "--no-flag")
	assert.NotContains(t, got.KW, "enable_prompt_tokens_details", "servers alone have it")
	content, err := os.ReadFile(filepath.Join(dir, "conf-decode.yaml"))
	require.NoError(t, err)
	assert.Equal(t, want.Files[0].Content, string(content))
}

func TestKubernetesFindsFilesAndItsOwnAddress(t *testing.T) {
	own := rendering{func(t launch.Target) (launch.Settings, error) {
		host := t.Endpoint.Host()
		return launch.Settings{
			Engine: "sglang", Files: []launch.File{{Name: "f.yaml", Content: "a: 1\n"}},
			Args: []string{"--file=f.yaml", "--peer", "decode-0.m", "--bind=" + host},
			Env:  []launch.EnvVar{{Name: "HOST", Value: host}, {Name: "DOLLAR", Value: "$(HOST) $HOST"}},
		}, nil
	}}
	p, err := launch.With(
		own, launch.Deployment{Endpoints: endpoints(t, "http://prefill-0.m:8000", "http://decode-0.m:8000"),
			Model: "m"},
	)
	require.NoError(t, err)
	text := string(p.Kubernetes())
	for _, part := range []string{`- "--file=/etc/pdkit/f.yaml"`, `- "--bind=$(POD_IP)"`, `- "decode-0.m"`,
		`value: "$(POD_IP)"`, `value: "$$(HOST) $$HOST"`, "clusterIP: None", `subdomain: "m"`,
		"fieldPath: status.podIP"} {
		assert.Contains(t, text, part)
	}
	p, err = launch.With(
		own, launch.Deployment{Endpoints: endpoints(t, "http://10.0.0.1:8000", "http://10.0.0.2:8000"), Model: "m"},
	)
	require.NoError(t, err)
	assert.NotContains(t, string(p.Kubernetes()), "kind: Service", "addresses need no names")
}

func TestTargetsKnowTheirPlaceAmongTheEngines(t *testing.T) {
	list := append(endpoints(t, "http://p0:1", "http://d0:1"), endpoints(t, "http://p1:1", "http://d1:1")...)
	encode, err := discovery.New("http://e0:1", discovery.RoleEncode)
	require.NoError(t, err)
	var seen []string
	p, err := launch.With(rendering{func(t launch.Target) (launch.Settings, error) {
		seen = append(seen, t.Endpoint.Host())
		if len(t.Engines) != 4 {
			return launch.Settings{}, errors.New("all engines but those of role encode")
		}
		return launch.Settings{
			Engine: "vllm", Notes: []launch.Note{{Path: "a", Text: "all"}, {Path: "b", Text: t.Endpoint.Host()}},
		}, nil
	}}, launch.Deployment{Endpoints: append(list, encode), Model: "m"})
	require.NoError(t, err)
	names := make([]string, len(p.Engines))
	for i, e := range p.Engines {
		names[i] = e.Name
	}
	assert.Equal(t, []string{"prefill-0", "decode-0", "prefill-1", "decode-1"}, names)
	assert.Equal(t, []string{"p0", "d0", "p1", "d1"}, seen, "encode engines hold no KV")
	assert.Equal(t, []launch.Note{{Path: "a", Text: "all"}}, p.Notes, "what every engine says is said once")
	assert.Len(t, p.Engines[0].Settings.Notes, 1)
}

func TestSettingsThatCannotBeWrittenAreRefused(t *testing.T) {
	for name, s := range map[string]launch.Settings{
		"name for an environment": {Env: []launch.EnvVar{{Name: "A B"}}},
		"plain file name":         {Files: []launch.File{{Name: "../x"}}},
		"zero byte":               {Args: []string{"a\x00"}},
		"companion":               {Companions: []launch.Companion{{Name: "A", Command: []string{"x"}}}},
		"no command":              {Companions: []launch.Companion{{Name: "a"}}},
	} {
		_, err := launch.With(rendering{func(launch.Target) (launch.Settings, error) { return s, nil }},
			launch.Deployment{Endpoints: endpoints(t, "http://p:1", "http://d:1"), Model: "m"})
		require.ErrorContains(t, err, name)
		require.ErrorContains(t, err, "prefill-0")
	}
	_, err := launch.With(rendering{func(t launch.Target) (launch.Settings, error) {
		return launch.Settings{Files: []launch.File{{Name: "f", Content: t.Endpoint.Host()}}}, nil
	}}, launch.Deployment{Endpoints: endpoints(t, "http://p:1", "http://d:1"), Model: "m"})
	require.ErrorContains(t, err, "decode-0: file f has another content", "they lie in one folder")
	_, err = launch.With(silent{}, launch.Deployment{})
	require.ErrorIs(t, err, launch.ErrNoSettings)
	_, err = launch.Model(launch.Deployment{Spec: config.Spec{Type: "nothing"}})
	require.ErrorIs(t, err, names.ErrUnknown)
	failed := errors.New("no port")
	_, err = launch.With(rendering{func(launch.Target) (launch.Settings, error) { return launch.Settings{}, failed }},
		launch.Deployment{Endpoints: endpoints(t, "http://p:1", "http://d:1"), Model: "m"})
	require.ErrorIs(t, err, failed)
}

func TestAnEngineMadeFromFilesHasNoPython(t *testing.T) {
	p, err := launch.With(rendering{func(launch.Target) (launch.Settings, error) {
		return launch.Settings{Engine: "trtllm"}, nil
	}}, launch.Deployment{Endpoints: endpoints(t, "http://p:1", "http://d:1"), Model: "m"})
	require.NoError(t, err)
	_, err = p.Python()
	require.ErrorIs(t, err, launch.ErrNoPython)
}

func TestLabels(t *testing.T) {
	for in, want := range map[string]string{"Org/Llama 2's": "org-llama-2-s", "": "model", "é": "model", "--a--": "a",
		strings.Repeat("x", 50): strings.Repeat("x", 40)} {
		assert.Equal(t, want, launch.Label(in))
	}
}

func TestNoLimitsNamesTheLimitsThatAreGiven(t *testing.T) {
	assert.Empty(t, launch.NoLimits(config.Resources{}, "why"))
	assert.Equal(
		t, []launch.Note{launch.NoEffect("resources.maxMemory", "why"),
			launch.NoEffect("resources.maxBandwidth", "why")},
		launch.NoLimits(config.Resources{MaxMemory: "8Gi", MaxBandwidth: "1G"}, "why"))
}

// A setting is told once, and only if no engine has it. An engine that cannot be launched tells nothing.
func TestIdleSettingsAreThoseThatNoEngineHas(t *testing.T) {
	var engines []discovery.Endpoint
	for _, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode, discovery.RoleBoth} {
		e, err := discovery.New("http://"+role.String()+":8000", role)
		require.NoError(t, err)
		engines = append(engines, e)
	}
	c := rendering{func(target launch.Target) (launch.Settings, error) {
		assert.Equal(t, engines, target.Engines)
		nowhere := launch.NoEffect("config.nowhere", "nobody reads it")
		onlyP := launch.NoEffect("config.onlyP", "P alone reads it")
		switch target.Endpoint.Role {
		case discovery.RolePrefill:
			return launch.Settings{Notes: []launch.Note{nowhere, {Path: "config.onlyP", Text: "a file"}}}, nil
		case discovery.RoleDecode:
			return launch.Settings{Notes: []launch.Note{onlyP, nowhere}}, nil
		}
		return launch.Settings{Notes: []launch.Note{launch.NoEffect("role", "")}}, errors.New("no such engine")
	}}
	assert.Equal(t, []launch.Note{launch.NoEffect("config.nowhere", "nobody reads it")},
		launch.Idle(c, launch.Deployment{Endpoints: engines}))
	assert.Empty(t, launch.Idle(silent{}, launch.Deployment{Endpoints: engines}))
}
