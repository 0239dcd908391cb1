// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/flags"
	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/connector/names"
)

var update = flag.Bool("update", false, "write the golden files anew")

// pdctl runs the program.
func pdctl(t *testing.T, in string, args ...string) (code int, out, errs string) {
	t.Helper()
	var commands any = &cli{}
	if len(args) > 0 && (args[0] == "render" || args[0] == "check") {
		// Hundreds of calls: to make all commands takes most of the time of one.
		commands = &struct {
			Render renderCmd `cmd:""`
			Check  checkCmd  `cmd:""`
		}{}
	}
	var o, e strings.Builder
	code = runOf(commands, args, streams{strings.NewReader(in), &o, &e})
	return code, o.String(), e.String()
}

func rendered(t *testing.T, args ...string) string {
	t.Helper()
	code, out, errs := pdctl(t, "", append([]string{"render"}, args...)...)
	require.Equal(t, exitOK, code, errs)
	return out
}

// comments are removed from the golden files: each connector's own tests check what it says about its settings.
var comments = regexp.MustCompile(`(?m)^ *# .*\n`)

func golden(t *testing.T, name, got string) {
	t.Helper()
	got = comments.ReplaceAllString(got, "")
	file := filepath.Join("testdata", "golden", name)
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o750))
		require.NoError(t, os.WriteFile(file, []byte(got), 0o600))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, string(want), got, "go test -run %s -update writes it anew", t.Name())
}

const documents = "../gateway/testdata/documents/"

func TestTheDesignDocumentsExamplesAreRendered(t *testing.T) {
	for _, name := range []string{"2-http", "2-nixl", "2-lmcache"} {
		for format, ending := range endings {
			golden(t, name+ending, rendered(t, "-f", documents+name+
				".yaml", "--format", format, "--engine-version", "0.32.0"))
		}
	}
	for _, name := range []string{"1-http", "1-nixl", "1-lmcache", "4-lmcache"} {
		rendered(t, "-f", documents+name+".yaml")
	}
}

// These are the six connectors that the guide starts from Python.
func TestTheConnectorGuidesSixConnectorsAreRendered(t *testing.T) {
	for name, version := range map[string]string{"sharedstorage": "0.12.0", "pynccl": "0.8.5", "p2pnccl": "0.22.0",
		"lmcache": "0.32.0", "nixl": "0.32.0", "multi": "0.32.0"} {
		args := []string{"-f", "testdata/documents-3.yaml", "--server", name, "--engine-version", version}
		golden(t, "3-"+name+".py", rendered(t, append(args, "--format", "python")...))
		golden(t, "3-"+name+".sh", rendered(t, args...))
	}
}

// Each setting of a ModelServer is rendered, or a note says that it has no effect. None is dropped without a note.
func TestNoSettingOfTheDocumentsIsDroppedInSilence(t *testing.T) {
	for name, file := range map[string]string{"2-nixl": "nixl", "2-lmcache": "lmcache"} {
		list, err := readModels(documents+name+".yaml", nil)
		require.NoError(t, err)
		require.Equal(t, file, list[0].spec.Type)
		var config map[string]any
		docs, faults := readYAML("config", list[0].spec.Config)
		require.Empty(t, faults)
		config = docs[0]
		out := rendered(t, "-f", documents+name+".yaml")
		for _, key := range slices.Sorted(maps.Keys(config)) {
			if _, told := map[string]bool{"networkInterface": true, "port": true, "protocol": true,
				"keepAliveInterval": true}[key]; told && name == "2-nixl" {
				continue // the golden file has it among the variables
			}
			assert.Contains(t, out, "config."+key, name)
		}
		assert.Contains(t, out, "resources.maxMemory")
	}
}

// settings are the settings that a connector needs to be launched: a working gateway configuration.
var settings = map[string]struct{ config, prefill, decode string }{
	"http":      {},
	"nixl":      {},
	"nixl-push": {prefill: "engineID=p0 sideChannelHost=HOST sideChannelPort=5600"},
	"lmcache":   {config: `{serverEndpoints: ["store:65432"]}`},
	"lmcache-pd": {config: `{notifyListen: "10.9.9.9:8500"}`,
		decode: "receiverHost=HOST receiverInitPorts=8300 receiverAllocPorts=8400"},
	"mooncake":         {},
	"mooncake-store":   {config: `{master_server_address: "master:50051"}`},
	"mooncake-ascend":  {},
	"mooncake-hybrid":  {},
	"ascend-store":     {},
	"flexkv":           {},
	"hf3fs":            {},
	"ucm":              {},
	"relay":            {config: `{kv_connector: HouseConnector}`},
	"tpu":              {},
	"kvbm":             {},
	"ascend-layerwise": {},
	"sharedstorage":    {config: `{shared_storage_path: /mnt/kv}`},
	"pynccl":           {},
	"p2pnccl":          {prefill: "zmqAddress=IP:21001", decode: "zmqAddress=IP:21001"},
	"moriio":           {prefill: "handshakePort=6301 notifyPort=61005", decode: "handshakePort=6301 notifyPort=61005"},
	"offload-p2p":      {prefill: "p2pHost=HOST"},
	"multi": {config: `{connectors: [{type: nixl}, {type: sharedstorage, config: {shared_storage_path: ` +
		`/mnt/kv}}]}`},
	"sglang": {},
	"trtllm": {},
}

// releases are the last of vLLM that have a connector, where the newest has not.
var releases = map[string]string{"pynccl": "0.10.2", "p2pnccl": "0.22.0"}

// written is a file of its own with a content.
func written(t *testing.T, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "file.yaml")
	require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
	return file
}

const modelServerHead = "apiVersion: networking.matrixinfer.ai/v1alpha1\nkind: ModelServer\n"

// modelServerFile writes a gateway's configuration for one connector.
func modelServerFile(t *testing.T, connectorType, config string) string {
	t.Helper()
	return written(t, modelServerHead+fmt.Sprintf("metadata: {name: one}\nspec:\n  model: Org/Model\n  kvConnector: "+
		"{type: %s, config: %s}\n", connectorType, cmp.Or(config, "{}")))
}

// Check reads what is rendered in each form, and finds nothing.
func TestWhatIsRenderedHasNoFindings(t *testing.T) {
	for _, name := range names.Connectors() {
		s, known := settings[name]
		require.True(t, known, "write settings for %s, with which it works", name)
		file := modelServerFile(t, name, s.config)
		for hosts, pair := range map[string][2]string{
			"two machines": {"10.0.0.1", "10.0.0.2"},
			"one machine":  {"127.0.0.1", "127.0.0.1"},
		} {
			for _, format := range []string{"shell", "compose", "kubernetes", "python"} {
				if name == "trtllm" && format == "python" {
					continue // which Python cannot make
				}
				t.Run(name+"/"+hosts+"/"+format, func(t *testing.T) {
					engine := func(host, port, attributes string) string {
						ip := strings.ReplaceAll(attributes, "IP", host)
						return "http://" + host + ":" + port + " " + strings.ReplaceAll(ip, "HOST", host)
					}
					decode := s.decode
					if hosts == "one machine" { // then each engine needs ports of its own
						decode = strings.NewReplacer("21001", "22001", "6301", "6401", "61005", "62005").Replace(decode)
					}
					args := []string{"-f", file, "--format", format, "--prefill", engine(pair[0], "8100", s.prefill),
						"--decode", engine(pair[1], "8200", decode), "--gateway", "10.9.9.9"}
					release := []string{"--engine-version", cmp.Or(releases[name], "0.33.0")}
					args = append(args, release...)
					out := rendered(t, args...)
					code, report, errs := pdctl(t, out, append([]string{"check", "-f", file, "-"}, release...)...)
					assert.Equal(t, exitOK, code, errs)
					assert.Equal(t, "2 engines read: 0 errors, 0 warnings\n", report)
					assert.Equal(t, out, rendered(t, args...), "the same twice")
					if format == "shell" {
						syntax(t, "sh", out, "-n")
					}
				})
			}
		}
		if name != "trtllm" {
			t.Run(name+"/python", func(t *testing.T) {
				syntax(t, "python3", rendered(t, "-f", file, "--format", "python", "--prefill", "http://10.0.0.1:1 "+
					strings.NewReplacer("IP", "10.0.0.1", "HOST", "10.0.0.1").Replace(s.prefill),
					"--decode", "http://10.0.0.2:1 "+
						strings.NewReplacer("IP", "10.0.0.2", "HOST", "10.0.0.2").Replace(s.decode)), "-m",
					"py_compile")
			})
		}
	}
}

// Check reads the same engine from each form: what one form loses is not checked there.
func TestEachFormHasTheSameEngines(t *testing.T) {
	for _, name := range names.Connectors() {
		s := settings[name]
		file := modelServerFile(t, name, s.config)
		at := strings.NewReplacer("IP", "10.0.0.1", "HOST", "10.0.0.1")
		read := func(format string) map[string]flags.Engine {
			out := rendered(t, "-f", file, "--format", format, "--prefill",
				"http://10.0.0.1:8100 "+at.Replace(s.prefill),
				"--decode", "http://10.0.0.1:8200 "+at.Replace(s.decode), "--gateway", "10.9.9.9")
			list, err := readInput("input", []byte(out))
			require.NoError(t, err)
			engines := map[string]flags.Engine{}
			for _, l := range list {
				e, ok, err := l.parse(launch.Version{Minor: 32})
				require.NoError(t, err)
				if ok {
					short := l.name[strings.LastIndexAny(l.name, "/")+1:]
					e.Name, e.Node, e.Host, e.Port, e.Served = "", "", "", 0, nil // which Python's engines do not have
					engines[short] = e
				}
			}
			return engines
		}
		want := read("shell")
		require.Len(t, want, 2, name)
		for _, format := range []string{"compose", "python"} { // in Kubernetes an engine's own address is the pod's
			if name == "trtllm" && format == "python" {
				continue
			}
			assert.Equal(t, want, read(format), "%s %s", name, format)
		}
		assert.Len(t, read("kubernetes"), 2, name)
	}
}

// Check reads Python only in the form that render writes. It reports the line of anything else.
func TestPythonThatIsNotRendered(t *testing.T) {
	for text, want := range map[string]string{
		"def a():\n    return LLM(\n        model=name(),\n    )\n": "",
		"def a():\n    return LLM(\n        model=%s,\n    )\n":     "x.py:3: is not as",
		"def a():\n    return LLM(model=\"m\"":                      "x.py:2: is not as",
		"def a():\n    return LLM(m=[1 2])":                         "want , or ]",
		"def a():\n    return LLM(m={1 2})":                         "want :",
		"def a():\n    environ(":                                    "want a value",
		"def a():\n    return LLM(" + strings.Repeat("a(", 1<<20):   "fewer values",
		"def a():\n    return LLM(a=" + strings.Repeat("[", 1<<20):  "fewer values",
	} {
		_, err := readInput("x.py", []byte(text))
		if want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, want, "%.60s", text)
	}
}

// syntax asks an interpreter whether it can parse a program. On a build machine a missing interpreter fails the test,
// since otherwise nothing would be tested.
func syntax(t *testing.T, interpreter, text string, args ...string) {
	t.Helper()
	path, err := exec.LookPath(interpreter)
	if err != nil {
		require.Empty(t, os.Getenv("CI"), "CI must have "+interpreter)
		t.Skip("needs " + interpreter + ", which this machine does not have")
	}
	file := filepath.Join(t.TempDir(), "program")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	out, err := exec.CommandContext(t.Context(), path, append(args, file)...).CombinedOutput()
	assert.NoError(t, err, "%s", out)
}

func TestRenderWritesAFileForEachModelServer(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	assert.Empty(t, rendered(t, "-f", "testdata/documents-3.yaml", "-o", dir))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
		info, err := e.Info()
		require.NoError(t, err)
		assert.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "a store's password may be among the settings")
	}
	assert.Equal(t, []string{"lmcache.sh", "multi.sh", "nixl.sh", "p2pnccl.sh", "pynccl.sh", "sharedstorage.sh"}, names)
}

func TestRenderReadsEndpointsFromWhereverTheyAre(t *testing.T) {
	file := written(t, modelServerHead+"metadata: {name: m}\nspec:\n  model: m\n  workloadSelector: {matchLabels: "+
		"{app: m}}\n  kvConnector: {type: nixl}\n  discovery: {file: {path: endpoints.yaml}}\n")
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(file), "endpoints.yaml"), []byte("endpoints:\n"+
		"- {url: \"http://10.0.0.7:1\", role: prefill}\n- {url: \"http://10.0.0.8:2\", role: decode, group: a}\n"),
		0o600))
	out := rendered(t, "-f", file)
	assert.Contains(t, out, "--host 10.0.0.7")
	assert.NotContains(t, out, "lists no engines")

	out = rendered(t, "-f", documents+"2-nixl.yaml", "--format", "kubernetes", "--model", "/models/x", "--image",
		"own:1")
	for _, part := range []string{`"role": "prefill"`, `"app": "llama2-405b"`, `- "/models/x"`,
		`- "--served-model-name"`, `image: "own:1"`, "lists no engines"} {
		assert.Contains(t, out, part)
	}
	out = rendered(t, "-f", documents+"2-nixl.yaml", "--cpu")
	assert.Contains(t, out, `"kv_buffer_device":"cpu"`)
}

func TestAnEncodeStageIsRendered(t *testing.T) {
	file := written(t, modelServerHead+"metadata: {name: m}\nspec:\n  model: m\n  kvConnector: {type: nixl}\n  "+
		"encoder: {type: example, config: {sharedStoragePath: /mnt/ec}}\n")
	for _, format := range []string{"shell", "compose", "kubernetes"} {
		out := rendered(t, "-f", file, "--format", format)
		assert.Equal(t, 2, strings.Count(out, "--ec-transfer-config"), "the encode engine and the prefill engine")
		code, report, errs := pdctl(t, out, "check", "-f", file, "-")
		assert.Equal(t, exitOK, code, errs)
		assert.Equal(t, assumed+"3 engines read: 0 errors, 0 warnings\n", report)
	}
	code, _, errs := pdctl(t, modelServerHead+"spec: "+
		"{kvConnector: {type: nixl}, encoder: {type: other}}\n", "render", "-f", "-")
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "spec.encoder")
}

func TestRenderSaysWhatItCannotDo(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		text string
	}{
		"no file":        {[]string{"-f", "gone.yaml"}, "gone.yaml"},
		"several":        {[]string{"-f", "testdata/documents-3.yaml"}, "choose one with --server"},
		"no such server": {[]string{"-f", "testdata/documents-3.yaml", "--server", "x"}, "choose one with --server"},
		"version":        {[]string{"-f", documents + "2-nixl.yaml", "--engine-version", "new"}, "--engine-version"},
		"format":         {[]string{"-f", documents + "2-nixl.yaml", "--format", "helm"}, "must be one of"},
		"URL":            {[]string{"-f", documents + "2-nixl.yaml", "--prefill", "x"}, "--prefill"},
		"attribute":      {[]string{"-f", documents + "2-nixl.yaml", "--prefill", "http://a:1 b"}, "KEY=VALUE"},
		"python of trtllm": {[]string{"-f", modelServerFile(t, "trtllm", ""), "--format", "python"},
			"not made from Python"},
		"unknown connector": {[]string{"-f", modelServerFile(t, "nixxl", "")}, "did you mean nixl?"},
		"unknown setting":   {[]string{"-f", modelServerFile(t, "nixl", "{leese: 1}")}, "leese"},
	} {
		t.Run(name, func(t *testing.T) {
			code, _, errs := pdctl(t, "", append([]string{"render"}, c.args...)...)
			assert.Equal(t, exitUsage, code)
			assert.Contains(t, errs, c.text)
		})
	}
	code, _, errs := pdctl(t, modelServerHead+"spec:\n  "+
		"kvConnector: {type: nixl, retries: 3}\n", "render", "-f", "-")
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "-:4: spec.kvConnector.retries: unknown field; did you mean retry?")
}

// pdctl refuses what the gateway refuses, in the same words, since both use the same reader.
func TestAModelServerIsReadAsTheGatewayReadsIt(t *testing.T) {
	const head = "kind: ConfigMap\ndata: {free: [1]}\n---\napiVersion: networking.matrixinfer.ai/v1alpha1\nkind: " +
		"ModelServer\n"
	for spec, want := range map[string]string{
		"{modell: m}": "pdctl: -:6: spec.modell: unknown field; did you mean model?\n",
		"{workloadSelector: {matchLabel: {}}}": "pdctl: -:6: spec.workloadSelector.matchLabel: unknown field; " +
			"did you mean matchLabels?\n",
		"{workloadPort: {port: 70000}}": "pdctl: -:6: spec.workloadPort.port: is not a port; write 1 " +
			"to 65535\n",
		"{discovery: {file: {}, static: {}}}":      "spec.discovery: has static and file",
		"{rollout: {weight: 1}}":                   "spec.rollout.kvConnector: is missing",
		"{discovery: {static: {endpoints: [{}]}}}": "spec.discovery.static.endpoints[0].role: is missing",
	} {
		code, _, errs := pdctl(t, head+"spec: "+spec+"\n", "render", "-f", "-")
		assert.Equal(t, exitUsage, code, spec)
		assert.Contains(t, errs, want, spec)
	}
}
