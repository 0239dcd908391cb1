// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

const required = "required"

// defaults are what holds where a field is left out: a value as YAML, required, or words. "" is for fields whose zero
// value means what it says.
var defaults = map[string]string{
	"spec.listen": "127.0.0.1:8000", "spec.admin": "127.0.0.1:9000", "spec.maxBodyBytes": "33554432",
	"spec.maxBytesInFlight":                        "a quarter of the memory limit, or 1 GiB",
	"spec.drainTimeout":                            "30s",
	"spec.modelServers.namespace":                  "default",
	"spec.model":                                   `"*"`,
	"spec.adapters":                                "auto",
	"spec.modelNames":                              "clients name models as engines do",
	"spec.workloadPort.port":                       "8000",
	"spec.kvConnector.type":                        "http",
	"spec.kvConnector.timeouts.connect":            "2s",
	"spec.kvConnector.timeouts.prefill":            "60s",
	"spec.kvConnector.timeouts.handoff":            "the connector's lease less 5s",
	"spec.kvConnector.timeouts.decode":             "600s",
	"spec.kvConnector.timeouts.idle":               "60s",
	"spec.kvConnector.timeouts.silence":            "10m",
	"spec.kvConnector.timeouts.transfer":           "none",
	"spec.kvConnector.timeouts.cleanup":            "5s",
	"spec.kvConnector.timeouts.healthCheck":        "2s",
	"spec.kvConnector.retry.maxAttempts":           "2",
	"spec.kvConnector.retry.backoffBase":           "50ms",
	"spec.kvConnector.retry.backoffMax":            "2s",
	"spec.kvConnector.retry.budget":                "0.2",
	"spec.kvConnector.retry.timeoutFinal":          "false",
	"spec.kvConnector.retry.hedge":                 "no second prefill",
	"spec.kvConnector.fallback":                    "error",
	"spec.kvConnector.fallbackConnector":           "required with fallback: connector",
	"spec.kvConnector.unsupported":                 "aggregate",
	"spec.attestation.mode":                        "off",
	"spec.attestation.every":                       "1s",
	"spec.kvEvents.mode":                           "off",
	"spec.kvEvents.listen":                         "no listener",
	"spec.kvEvents.ranks":                          "one port",
	"spec.kvEvents.tokens":                         "off",
	"spec.kvEvents.tokensTimeout":                  "250ms",
	"spec.encoder.type":                            required,
	"spec.rollout.weight":                          required,
	"spec.rollout.kvConnector":                     required,
	"spec.rescue.mode":                             "off",
	"spec.rescue.maxPerRequest":                    "1",
	"spec.keepAlive.after":                         "no keep-alive",
	"spec.usage":                                   "corrected",
	"spec.admission.mode":                          "off",
	"spec.admission.inFlightPerPrefill":            "no limit",
	"spec.admission.inFlightPerDecode":             "no limit",
	"spec.admission.queue":                         "256",
	"spec.admission.queueTimeout":                  "10s",
	"spec.admission.priorityHeader":                "none",
	"spec.decision.mode":                           "always",
	"spec.decision.minPromptTokens":                "0",
	"spec.decision.uncachedTokens":                 "0",
	"spec.decision.objectives.ttft":                "2s",
	"spec.decision.objectives.itl":                 "100ms",
	"spec.decision.dryRun":                         "false",
	"spec.discovery.static.endpoints[].url":        required,
	"spec.discovery.static.endpoints[].role":       required,
	"spec.discovery.file.path":                     required,
	"spec.discovery.dns.resolver":                  "the system's",
	"spec.discovery.kubernetes.kubeconfig":         "the cluster that the gateway runs in",
	"spec.discovery.kubernetes.namespace":          "the namespace in metadata",
	"spec.discovery.kubernetes.port":               "that of workloadPort",
	"spec.discovery.kubernetes.ports":              "one port",
	"spec.modelServers.kubeconfig":                 "the cluster that the gateway runs in",
	"spec.workloadSelector.pdGroup.encodeLabels":   "no encode engines",
	"spec.discovery.registration.listen":           "no ZeroMQ",
	"spec.discovery.registration.http":             "no HTTP",
	"spec.discovery.dns.port":                      "asked for by SRV records",
	"spec.kvConnector.config":                      "the connector's own defaults",
	"spec.kvConnector.resources.maxMemory":         "no limit",
	"spec.kvConnector.resources.maxDisk":           "no limit",
	"spec.kvConnector.resources.maxBandwidth":      "no limit",
	"spec.discovery.static.endpoints[].attributes": "none",
	"spec.encoder.config":                          "none",
	"spec.workloadSelector.matchLabels":            "all pods of the groups",
	"spec.workloadSelector.pdGroup.groupKey":       "one group",
	"spec.passthrough":                             `""`,
	"spec.forwardHeaders":                          "none",
	"spec.passthroughPaths":                        "none",
	"spec.tls.certFile":                            "none; a Gateway with tls needs it",
	"spec.tls.keyFile":                             "none; a Gateway with tls needs it",
	"spec.tls.clientCAFile":                        `""`,
	"spec.tls.caFile":                              "the system's",
	"spec.tls.serverName":                          "the host of the URL",
	"spec.registrationTokenFile":                   `""`,
	"spec.discovery.static.endpoints[].group":      `""`,
	"spec.discovery.static.endpoints[].zone":       `""`,
	"spec.inferenceEngine":                         "",
	"spec.trafficPolicy":                           "",
	"spec.workloadPort.protocol":                   "",
	"spec.discovery.dns.prefill":                   "",
	"spec.discovery.dns.decode":                    "",
	"spec.discovery.dns.encode":                    "",
	"spec.discovery.kubernetes.service":            "",
	"spec.workloadSelector.pdGroup.prefillLabels":  "",
	"spec.workloadSelector.pdGroup.decodeLabels":   "",
}

// abouts are said in place of a field's comment, where that speaks to a programmer.
var abouts = map[string]string{
	"spec.passthroughPaths": "paths that may pass besides those of " +
		"[passthrough's list](../cmd/gateway/README.md#the-clients-side); `*` stands for any one element, and as the " +
		"last one for one or more",
	"spec.forwardHeaders": "headers of clients that engines get besides [the usual ones](embedding.md#api-keys); " +
		"cookies and hop-by-hop headers are refused",
	"spec.kvConnector.config": "the connector's own settings; `parameters` is another word for it",
	"spec.kvConnector.timeouts.handoff": "the oldest handoff that decode may still use, from the last byte of " +
		"P's response; of a lease under 10s the default is half",
	"spec.kvConnector.timeouts.idle": "silence of a response in mid-stream; then the engine's health is asked, and " +
		"the response cut if the engine is not well",
	"spec.kvConnector.timeouts.silence": "silence of a response in mid-stream whose engine is well",
	"spec.kvConnector.timeouts.transfer": "from P's last byte to D's first event; then another pair is tried: " +
		"see [retries](retries.md#a-pair-that-hangs)",
	"spec.kvConnector.timeouts.cleanup":     "what a connector does after a failed request",
	"spec.kvConnector.timeouts.healthCheck": "one probe of an engine",
	"spec.kvConnector.retry.maxAttempts":    "attempts at pairs of engines, the first included; at least 1",
	"spec.kvConnector.retry.backoffMax": "longest pause, also where an engine asks for more by Retry-After; " +
		"at least backoffBase",
	"spec.kvConnector.resources.maxMemory": "limits of the engines' KV stores: rendered for the engines by `pdctl " +
		"render`, and told where an engine has none",
	"spec.kvConnector.resources.maxDisk":      "as maxMemory",
	"spec.kvConnector.resources.maxBandwidth": "as maxMemory; bytes a second",
	"spec.kvConnector.fallback": "when no pair could serve with KV transfer: `error`, `decode` (a " +
		"decode engine alone), or `connector` (the next one: fallbackConnector)",
	"spec.kvConnector.fallbackConnector": "shaped as spec.kvConnector, with a fallback of its own if wanted",
	"spec.kvConnector.unsupported": "requests that the protocol cannot carry: `aggregate` sends them to " +
		"one engine, `refuse` answers 400",
	"spec.rescue.mode": "`on` lets greedy streams go on at another pair when their decode engine dies: see " +
		"[rescue](reliability/rescue.md)",
	"spec.keepAlive.after": "after how much silence the client of a streamed request gets a comment (a `ping` event " +
		"on `/v1/messages`), and the response's head with the first one: see [troubleshooting](troubleshooting.md)",
	"spec.usage": "`corrected` gives clients prefill's count of cached tokens where decode's engine counts what it " +
		"took over; `engine` leaves responses as they are: see [the prompt's members](protocols/prompt-members.md)",
	"spec.kvEvents.mode": "`entries` subscribes to the KV-cache events of engines whose entries have the attribute " +
		"kvEvents; `ask` also to those of the others that say where they publish: see [KV events](kv-events.md)",
	"spec.kvEvents.tokens": "`engines` asks them which tokens a prompt has, before the pick; `off` asks nobody",
	"spec.attestation.mode": "`report` finds engines and pairs that corrupt KV, by synthetic probes, and tells " +
		"them; `quarantine` also keeps requests away from them: see [attestation](attestation.md)",
	"spec.adapters": "LoRA adapters of the model, which requests name in its place: `auto` asks the engines every " +
		"few seconds which they have loaded with this model as their `parent`, by the engines' name for it " +
		"([picking](picking.md)), `off` has none; or their names",
	"spec.modelNames": "names by which clients ask for the model or an adapter, each with that by which the engines " +
		"serve it; `\"*\"` stands for all other names. Clients " +
		"get their own back, and `/v1/models` lists them",
	"spec.encoder.config": "the stage's own settings: maxItems, sharedStoragePath, cpuBytes",
}

// setting is a line of the page.
type setting struct {
	path, kind, about string
	example           string // JSON
}

// TestThePageListsEverySetting compares docs/configuration.md with what the types that are decoded say, their comments,
// and the examples in testdata/configuration.yaml. PDKIT_UPDATE=1 writes it.
func TestThePageListsEverySetting(t *testing.T) {
	const page = "../../docs/configuration.md"
	docs := exampleDocuments(t)
	var b strings.Builder
	b.WriteString(pageHead)
	known := map[string]bool{}
	for _, part := range []struct {
		title, about string
		spec         reflect.Type
		docs         []*yamlfile.Document
	}{
		{"Gateway", gatewayAbout, reflect.TypeFor[gatewaySpec](), docs[:1]},
		{"ModelServer", modelServerAbout, reflect.TypeFor[modelserver.Spec](), docs[1:]},
	} {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n| field | type | default | example | meaning |\n|---|---|---|---|---|\n",
			part.title, part.about)
		for _, s := range settingsOf(t, part.spec, "spec") {
			def, told := defaults[s.path]
			assert.True(t, told, "say in the table of this test what holds where %s is left out", s.path)
			known[s.path] = true
			s.example = exampleOf(part.docs, s.path)
			assert.NotEmpty(t, s.example, "testdata/configuration.yaml has no example of %s", s.path)
			proveDefault(t, part.docs, s.path, def)
			fmt.Fprintf(&b, "| `%s` | %s | %s | `%s` | %s |\n", s.path, s.kind, shownDefault(def), s.example, s.about)
		}
	}
	for _, path := range slices.Concat(slices.Collect(maps.Keys(defaults)), slices.Collect(maps.Keys(abouts))) {
		assert.True(t, known[path], "%s is no setting any more", path)
	}
	b.WriteString(decisionsAbout)
	example, err := os.ReadFile("testdata/configuration.yaml")
	require.NoError(t, err)
	fmt.Fprintf(&b, "\n## The examples as one file\n\n```yaml\n%s```\n", example)
	if os.Getenv("PDKIT_UPDATE") == "1" {
		require.NoError(t, os.WriteFile(page, []byte(b.String()), 0o644))
		return
	}
	have, err := os.ReadFile(page)
	require.NoError(t, err)
	assert.Equal(t, b.String(), string(have), "write it anew: PDKIT_UPDATE=1 go test -run ThePage ./gateway")
}

const pageHead = `# Configuration

<!-- Written by cmd/gateway's tests: PDKIT_UPDATE=1 go test -run ThePage ./gateway -->

cmd/gateway reads a stream of YAML documents: at most one of kind Gateway, and one of kind ModelServer for each model. pdctl and programs that import pdflow/modelserver read ModelServers in the same way, and a Kubernetes cluster can hold them as objects.

An unknown field, a wrong type and a value out of range are faults; a field that is null counts as left out. A duration is a string in Go's syntax (` + "`30s`, `1m30s`" + `), a quantity one in Kubernetes' (` + "`8Gi`, `500M`" + `). In ` + "`timeouts`" + `, 0 is no limit.
`

const decisionsAbout = `
## Decisions

` + "`spec.decision`" + ` says which requests are split between a prefill and a decode engine ([when to split](picking.md#when-to-split)).

| mode | what happens |
|---|---|
| ` + "`always`" + ` | each request is split, as without ` + "`decision`" + `. It costs nothing |
| ` + "`never`" + ` | a decode engine serves each request alone |
| ` + "`threshold`" + ` | a decode engine serves alone a prompt of fewer than ` + "`minPromptTokens`" + ` tokens, or one of which fewer than ` + "`uncachedTokens`" + ` are not in its prefix cache. One of the two must be given. What is in the caches is known with ` + "`-pick prefix`" + `, as far as the gateway remembers what it has sent, and with ` + "`-pick kv`" + `, as the engines' events tell. With any other policy nothing is known, and ` + "`uncachedTokens`" + ` is compared with the whole prompt |
| ` + "`predicted`" + ` | first the thresholds, where any is given. For all other requests the gateway predicts TTFT and ITL of each choice among at most eight engines of each role, and takes the one with the best chance to meet ` + "`objectives`" + ` and the least harm to the streams that run already. It learns the engines' speeds from the requests that it serves, and splits each request until it has. An engine that has taught it nothing for two minutes is taken to be like the others |

- A response that one engine has made says ` + "`X-PD-Mode: aggregated`" + `. ` + "`pd_attempts_total`" + ` has the reason, ` + "`pd_decisions_total`" + ` all decisions.
- ` + "`dryRun: true`" + ` counts what would have been decided (` + "`pd_decisions_total{pd_dry_run=\"true\"}`" + `) and changes nothing: each request is split, and its legs are the same to the byte. It is the way to begin.
- A request that a decode engine may serve alone needs no prefill engine that is well, or any. ` + "`/readyz`" + ` asks for a pair, except with ` + "`never`" + `.
- What a protocol forbids stays forbidden. With ` + "`sglang`, `p2pnccl` and `moriio`" + ` (in the modes in which its decode engines wait for each request's KV) only engines of role ` + "`both`" + ` serve alone. Requests with media for an encode engine are always split.
- ` + "`predicted`" + ` compares what it predicts with what comes, and shows the mean error (` + "`pd_decision_error_ratio`" + `). If predictions of TTFT or of ITL are wrong by a factor of two, they count for nothing until they are right again: the thresholds decide, and each other request is split (` + "`pd_decision_doubtful`" + ` is 1 then). For this it asks decode engines for the token counts of streams whose clients did not, and takes them out again; not in a dry run.
- With ` + "`spec.admission`, `predicted`" + ` also refuses a request that no choice can serve within ` + "`objectives`" + `, but that idle engines could: 503 with Retry-After (a minute at most), code ` + "`overloaded`" + `. A retry is never refused.
- A change of ` + "`decision`" + ` forgets what was learnt; one from or to ` + "`always`" + ` also the loads and prefixes that the picker knows. No request is lost.
- ` + "`-record-decisions FOLDER`" + ` keeps decisions, to be verified and played again ([record](record.md)).
`

const gatewayAbout = "The program's own settings. `apiVersion` is `pdkit.dev/v1alpha1`; `metadata` and `status` are " +
	"free in form. Flags of the program override `listen` and `admin`."

const modelServerAbout = "One model with its engines. `apiVersion` is `networking.matrixinfer.ai/v1alpha1` or " +
	"`networking.serving.volcano.sh/v1alpha1`. Of `metadata` the gateway reads `name` and `namespace` (default " +
	"`default`); `status` is free in form. `discovery` has exactly one member; if it is left out, it is " +
	"`kubernetes`. The type Options of each connector's package says what `kvConnector.config` may hold."

// exampleDocuments reads the page's examples. They are right, since the gateway takes them.
func exampleDocuments(t *testing.T) []*yamlfile.Document {
	t.Helper()
	data, err := os.ReadFile("testdata/configuration.yaml")
	require.NoError(t, err)
	docs, faults := yamlfile.Read("configuration.yaml", data)
	require.Empty(t, faults)
	_, err = parse("configuration.yaml", data)
	require.NoError(t, err)
	return docs
}

// jsonPath writes a setting's path for gjson and sjson, which name the first element of a list .0.
func jsonPath(path string) string { return strings.ReplaceAll(path, "[]", ".0") }

func exampleOf(docs []*yamlfile.Document, path string) string {
	for _, d := range docs {
		if v := gjson.GetBytes(d.JSON, jsonPath(path)); v.Exists() {
			return strings.Join(strings.Fields(v.Raw), " ")
		}
	}
	return ""
}

// proveDefault leaves a setting out of an example that has it: what is required is then a fault, and a default that is
// a value means the same as no value.
func proveDefault(t *testing.T, docs []*yamlfile.Document, path, def string) {
	t.Helper()
	isValue := regexp.MustCompile(`^("[^"]*"|[0-9a-z.:]+)$`).MatchString(def) && def != "none"
	if !isValue {
		return
	}
	for _, d := range docs {
		if !gjson.GetBytes(d.JSON, jsonPath(path)).Exists() {
			continue
		}
		without, err := sjson.DeleteBytes(slices.Clone(d.JSON), jsonPath(path))
		require.NoError(t, err)
		meaning, err := meaningOf(without)
		if def == required {
			assert.ErrorContains(t, err, "is missing", path)
			return
		}
		if err != nil { // what stands beside it needs another value
			continue
		}
		var value any = def
		if json.Unmarshal([]byte(def), &value) != nil {
			value = def
		}
		with, err := sjson.SetBytes(without, jsonPath(path), value)
		require.NoError(t, err)
		same, err := meaningOf(with)
		require.NoError(t, err, path)
		assert.Equal(t, meaning, same, "%s: left out, and with the default", path)
		return
	}
	t.Errorf("no example proves the default of %s", path)
}

// meaningOf returns what -check prints of one document, with a ModelServer beside a Gateway.
func meaningOf(doc []byte) (string, error) {
	cfg, err := parse("x.yaml", slices.Concat([]byte(modelYAML("")+"---\n"), doc))
	if gjson.GetBytes(doc, "kind").String() == modelserver.Kind {
		cfg, err = parse("x.yaml", doc)
	}
	if err != nil {
		return "", err
	}
	var b strings.Builder
	err = printCheck(&b, cfg)
	return b.String(), err
}

func shownDefault(def string) string {
	if def == required || def == "" || strings.Contains(def, " ") || def == "none" {
		return def
	}
	return "`" + strings.ReplaceAll(def, `"*"`, `*`) + "`"
}

// settingsOf lists the fields of a type that is decoded, in the order of the type.
func settingsOf(t *testing.T, typ reflect.Type, path string) (list []setting) {
	t.Helper()
	for f := range typ.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" { // for programs
			continue
		}
		s := setting{path: path + "." + name, about: cmp.Or(abouts[path+"."+name], commentOf(t, typ, f.Name))}
		of := f.Type
		if of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		recursive := of == reflect.TypeFor[config.Spec]() && s.path != "spec.kvConnector"
		switch {
		case of.Kind() == reflect.Slice && of.Elem().Kind() == reflect.Struct:
			list = append(list, settingsOf(t, of.Elem(), s.path+"[]")...)
			continue
		case of.Kind() == reflect.Struct && !recursive:
			list = append(list, settingsOf(t, of, s.path)...)
			continue
		case recursive:
			s.kind = "a kvConnector"
			s.about = cmp.Or(s.about, "shaped as spec.kvConnector")
		default:
			s.kind = kindOf(of)
		}
		assert.NotEmpty(t, s.kind, "%s has type %v", s.path, of)
		assert.NotEmpty(t, s.about, "field %s of %v has no comment", f.Name, typ)
		list = append(list, s)
	}
	return list
}

func kindOf(typ reflect.Type) string {
	switch typ {
	case reflect.TypeFor[config.Duration](), reflect.TypeFor[time.Duration]():
		return "duration"
	case reflect.TypeFor[config.Quantity]():
		return "quantity"
	case reflect.TypeFor[config.Ports]():
		return "list of ports"
	case reflect.TypeFor[json.RawMessage]():
		return "mapping"
	case reflect.TypeFor[modelserver.Adapters]():
		return "string or list of strings"
	case reflect.TypeFor[map[string]string]():
		return "mapping of strings"
	case reflect.TypeFor[[]string]():
		return "list of strings"
	}
	switch typ.Kind() {
	case reflect.String:
		return "string"
	case reflect.Int, reflect.Int64, reflect.Float64:
		return "number"
	case reflect.Bool:
		return "boolean"
	}
	return ""
}

// structType is a struct in source text.
type structType struct {
	*ast.StructType
	doc string
}

var (
	sources = map[string]map[string]structType{} // by import path and name of the type
	link    = regexp.MustCompile(`\[([A-Za-z.]+)\]`)
)

// commentOf returns the comment of a struct's field, from its source.
func commentOf(t *testing.T, typ reflect.Type, field string) string {
	t.Helper()
	dir := "."
	if below, ok := strings.CutPrefix(typ.PkgPath(), "github.com/pdkit/pdkit/"); ok &&
		!strings.HasPrefix(below, "cmd/") {
		dir = filepath.Join("..", "..", filepath.FromSlash(below))
	}
	if sources[dir] == nil {
		sources[dir] = structsIn(t, dir)
	}
	def := sources[dir][typ.Name()]
	require.NotNil(t, def.StructType, "type %v in %s", typ, dir)
	text := ""
	for _, f := range def.Fields.List {
		if slices.ContainsFunc(f.Names, func(n *ast.Ident) bool { return n.Name == field }) {
			text = f.Doc.Text() + " " + f.Comment.Text()
		}
	}
	if text = strings.Join(strings.Fields(text), " "); text == "" { // what is said of all its fields
		text, _, _ = strings.Cut(strings.Join(strings.Fields(def.doc), " "), ". ")
	}
	text, _, _ = strings.Cut(text, "; default") // which the page has in a column of its own
	return strings.ReplaceAll(link.ReplaceAllString(text, "$1"), "|", `\|`)
}

func structsIn(t *testing.T, dir string) map[string]structType {
	t.Helper()
	all := map[string]structType{}
	names, err := fs.Glob(os.DirFS(dir), "*.go")
	require.NoError(t, err)
	for _, name := range names {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, name), nil, parser.ParseComments)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			types, ok := decl.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, spec := range types.Specs {
				if def, ok := spec.(*ast.TypeSpec); ok {
					if fields, ok := def.Type.(*ast.StructType); ok {
						all[def.Name.Name] = structType{fields, cmp.Or(def.Doc.Text(), types.Doc.Text())}
					}
				}
			}
		}
	}
	require.NotEmpty(t, all)
	return all
}
