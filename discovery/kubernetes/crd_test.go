// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
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
	"sigs.k8s.io/yaml"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// tree is a part of a definition's schema, or any other object.
type tree = map[string]any

// nested is how many connectors to fall back to have a schema: a schema that the API server accepts cannot contain
// itself. What is deeper is free in form, and checked when it is used.
const nested = 2

const crdHead = `# ModelServer objects in the API group %s. Both groups have the same schema, in which
# kvConnector stands several times. To change it, edit spec.kvConnector in the file of networking.matrixinfer.ai, then
# run PDKIT_UPDATE=1 go test -run Manifests .
`

func crdFile(group string) string {
	return filepath.Join("manifests", "crd-modelservers."+group+".yaml")
}

// groups are those of the versions that ModelServers are read in.
func groups() []string {
	var all []string
	for _, v := range modelserver.APIVersions() {
		group, _, _ := strings.Cut(v, "/")
		all = append(all, group)
	}
	return all
}

func readYAML(t testing.TB, file string) tree {
	t.Helper()
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	var m tree
	require.NoError(t, yaml.Unmarshal(data, &m), file)
	return m
}

// part returns the object at a path of member names and list indices.
func part(t testing.TB, from tree, path ...any) tree {
	t.Helper()
	var v any = from
	for i, p := range path {
		switch p := p.(type) {
		case string:
			m, ok := v.(tree)
			require.True(t, ok, "%v", path[:i])
			v = m[p]
		case int:
			l, ok := v.([]any)
			require.True(t, ok && p < len(l), "%v", path[:i])
			v = l[p]
		}
	}
	m, ok := v.(tree)
	require.True(t, ok, "%v is no object", path)
	return m
}

func specSchema(t testing.TB, crd tree) tree {
	return part(t, crd, "spec", "versions", 0, "schema", "openAPIV3Schema", "properties", "spec")
}

// TestManifestsAreOneSchema writes what follows from the first group's spec.kvConnector, with PDKIT_UPDATE=1.
func TestManifestsAreOneSchema(t *testing.T) {
	crd := readYAML(t, crdFile(groups()[0]))
	properties := part(t, specSchema(t, crd), "properties")
	main := part(t, properties, "kvConnector")
	part(t, main, "properties")["fallbackConnector"] = fallback(t, main, nested)
	rollout := copied(t, main)
	rollout["description"] = "The other connector."
	part(t, properties, "rollout", "properties")["kvConnector"] = rollout
	for _, group := range groups() {
		part(t, crd, "metadata")["name"] = "modelservers." + group
		part(t, crd, "spec")["group"] = group
		data, err := yaml.Marshal(crd)
		require.NoError(t, err)
		want := fmt.Sprintf(crdHead, group) + string(data)
		if os.Getenv("PDKIT_UPDATE") == "1" {
			require.NoError(t, os.WriteFile(crdFile(group), []byte(want), 0o600))
		}
		have, err := os.ReadFile(crdFile(group))
		require.NoError(t, err)
		assert.Equal(t, want, string(have), "write it anew: PDKIT_UPDATE=1 go test -run Manifests .")
	}
}

// fallback returns the schema of a connector to fall back to, without the descriptions, which are the same.
func fallback(t testing.TB, connector tree, levels int) tree {
	const text = "The connector to fall back to, like kvConnector."
	if levels == 0 {
		return tree{"type": "object", "description": text, "x-kubernetes-preserve-unknown-fields": true}
	}
	s := copied(t, connector)
	undescribed(s)
	s["description"] = text
	part(t, s, "properties")["fallbackConnector"] = fallback(t, connector, levels-1)
	return s
}

func copied(t testing.TB, s tree) tree {
	t.Helper()
	data, err := json.Marshal(s)
	require.NoError(t, err)
	var c tree
	require.NoError(t, json.Unmarshal(data, &c))
	return c
}

func undescribed(s tree) {
	delete(s, "description")
	for _, v := range s {
		if m, ok := v.(tree); ok {
			undescribed(m)
		}
	}
}

// TestSchemaHasEveryFieldThatIsRead: a field that the schema lacks is dropped by the API server without a word, one
// that only the schema has is refused by whoever reads the object.
func TestSchemaHasEveryFieldThatIsRead(t *testing.T) {
	spec := specSchema(t, readYAML(t, crdFile(groups()[0])))
	discovery := part(t, spec, "properties", "discovery", "properties")
	assert.Equal(t, []string{"kubernetes"}, names(discovery),
		"files, listeners and other clusters are not for an object of a cluster to say")
	assert.Equal(t, []string{"port", "ports", "service"}, names(part(t, discovery, "kubernetes", "properties")))
	spec = copied(t, spec)
	// what package modelserver reads
	part(t, spec, "properties")["discovery"] = tree{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
	events := part(t, spec, "properties", "kvEvents", "properties")
	assert.Equal(t, []string{"mode", "tokens", "tokensTimeout"}, names(events), "nor are listeners for engines' events")
	events["listen"], events["ranks"] = tree{"type": "string"}, tree{"type": "integer"}
	for _, fault := range differ(spec, reflect.TypeFor[modelserver.Spec](), "spec") {
		t.Error(fault)
	}
}

func TestDifferFindsWhatIsMissingAndWhatIsOfAnotherType(t *testing.T) {
	spec := copied(t, specSchema(t, readYAML(t, crdFile(groups()[0]))))
	kv := part(t, spec, "properties", "rollout", "properties", "kvConnector", "properties", "fallbackConnector",
		"properties")
	delete(part(t, kv, "timeouts", "properties"), "idle")
	delete(kv, "parameters")
	part(t, kv, "retry", "properties", "maxAttempts")["type"] = "string"
	part(t, spec, "properties")["zone"] = tree{"type": "string"}
	events := part(t, spec, "properties", "kvEvents", "properties") // as TestSchemaHasEveryFieldThatIsRead has it
	events["listen"], events["ranks"] = tree{"type": "string"}, tree{"type": "integer"}
	part(t, spec, "properties", "workloadSelector", "properties", "matchLabels",
		"additionalProperties")["type"] = "integer"
	const in = "spec.rollout.kvConnector.fallbackConnector"
	assert.ElementsMatch(t, []string{
		in + ".timeouts.idle is not in the schema",
		in + ".parameters is not in the schema",
		in + ".retry.maxAttempts is string, want integer",
		"spec.zone is only in the schema",
		"spec.workloadSelector.matchLabels.* is integer, want string",
		"spec.discovery is not free in form",
	}, differ(spec, reflect.TypeFor[modelserver.Spec](), "spec"))
}

// differ compares a schema with a Go type that is decoded strictly.
func differ(s tree, typ reflect.Type, path string) (faults []string) {
	for typ.Kind() == reflect.Pointer {
		typ = typ.Elem()
	}
	want := "object"
	switch {
	case slices.Contains([]reflect.Type{reflect.TypeFor[time.Duration](), reflect.TypeFor[config.Duration](),
		reflect.TypeFor[config.Quantity]()}, typ):
		if s["x-kubernetes-int-or-string"] != true || s["pattern"] == nil {
			return []string{path + " is not a string with a pattern"}
		}
		return nil
	case typ == reflect.TypeFor[json.RawMessage](), typ == reflect.TypeFor[modelserver.Discovery](),
		typ == reflect.TypeFor[modelserver.Adapters](), // a word or a list
		typ == reflect.TypeFor[config.Spec]() && s["x-kubernetes-preserve-unknown-fields"] == true:
		if s["x-kubernetes-preserve-unknown-fields"] != true || s["properties"] != nil {
			return []string{path + " is not free in form"}
		}
		return nil
	case typ.Kind() == reflect.String && s["enum"] != nil && s["x-kubernetes-preserve-unknown-fields"] == true:
		return nil // words of which YAML reads some as booleans
	case typ.Kind() == reflect.String:
		want = "string"
	case typ.Kind() == reflect.Int:
		want = "integer"
	case typ.Kind() == reflect.Float64:
		want = "number"
	case typ.Kind() == reflect.Bool:
		want = "boolean"
	}
	if s["type"] != want {
		return []string{fmt.Sprintf("%s is %v, want %s", path, s["type"], want)}
	}
	switch typ.Kind() {
	case reflect.Map:
		values, _ := s["additionalProperties"].(tree)
		return differ(values, typ.Elem(), path+".*")
	case reflect.Struct:
		return differFields(s, typ, path)
	}
	return nil
}

func differFields(s tree, typ reflect.Type, path string) (faults []string) {
	properties, _ := s["properties"].(tree)
	fields := map[string]reflect.Type{}
	for f := range typ.Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "-" {
			fields[name] = f.Type
		}
	}
	if typ == reflect.TypeFor[config.Spec]() {
		fields["parameters"] = reflect.TypeFor[json.RawMessage]() // which only the JSON of a config.Spec has
	}
	for name, field := range fields {
		property, ok := properties[name].(tree)
		if !ok {
			faults = append(faults, path+"."+name+" is not in the schema")
			continue
		}
		faults = append(faults, differ(property, field, path+"."+name)...)
	}
	for name := range properties {
		if _, ok := fields[name]; !ok {
			faults = append(faults, path+"."+name+" is only in the schema")
		}
	}
	return faults
}

func names(m tree) []string { return slices.Sorted(maps.Keys(m)) }

func TestEnumsAreTheKnownValues(t *testing.T) {
	properties := part(t, specSchema(t, readYAML(t, crdFile(groups()[0]))), "properties")
	kv := part(t, properties, "kvConnector", "properties")
	known := []any{"", string(config.FallbackError), string(config.FallbackDecode), string(config.FallbackConnector)}
	assert.ElementsMatch(t, known,
		part(t, kv, "fallback")["enum"])
	assert.ElementsMatch(t, []any{"", string(config.UnsupportedAggregate), string(config.UnsupportedRefuse)},
		part(t, kv, "unsupported")["enum"])
	encoders, ok := part(t, properties, "encoder", "properties", "type")["enum"].([]any)
	require.True(t, ok)
	assert.Len(t, encoders, len(epd.Types()))
	for _, typ := range epd.Types() {
		assert.Contains(t, encoders, typ)
	}
}

func patternOf(t testing.TB, of, field string) *regexp.Regexp {
	t.Helper()
	kv := part(t, specSchema(t, readYAML(t, crdFile(groups()[0]))), "properties", "kvConnector", "properties")
	pattern, ok := part(t, kv, of, "properties", field)["pattern"].(string)
	require.True(t, ok)
	return regexp.MustCompile(pattern)
}

func TestDurationPatternIsWhatIsDecoded(t *testing.T) {
	pattern := patternOf(t, "timeouts", "prefill")
	texts := []string{"", "0", "+0", "00", "0s", "30s", "120s", "1m30s", "1.5h", ".5s", "5.s", ".s", ".", "s", "30",
		"30 s", "30S", "1h1", "-1s", "+1s",
		"++1s", "1e3s", "1d", "1w", "2us", "2µs", "2μs", "2ns", "2ms", "1h2m3s4ms5us6ns", "1.2.3s", "1,5s", " 1s",
		"1s ", "1s\n", "٣s", "0x1s", "1_0s"}
	for _, text := range texts {
		assert.Equal(t, decodes[config.Duration](text), pattern.MatchString(text), "%q", text)
	}
	assert.True(t, pattern.MatchString(time.Duration(math.MaxInt64).String()))
	assert.True(t, pattern.MatchString("9999999h"), "the pattern counts no digits: too long a time is refused when "+
		"it is read")
}

func TestQuantityPatternIsWhatIsDecoded(t *testing.T) {
	pattern := patternOf(t, "resources", "maxMemory")
	numbers := []string{"", "0", "8", "1.5", ".5", "5.", ".", "+3", "-1", "--1", "1.2.3", "1_0", "0x1", " 8"}
	suffixes := []string{"", "n", "u", "m", "k", "K", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "ki", "mi",
		"B", "GB", "GiB", "e", "e3", "E3", "e-3", "e+3", "e3i", "e3Ki", " Gi", "Gi "}
	for _, number := range numbers {
		for _, suffix := range suffixes {
			assert.Equal(t, decodes[config.Quantity](number+suffix), pattern.MatchString(number+suffix), "%q", number+
				suffix)
		}
	}
	assert.True(t, pattern.MatchString("9Ei"), "the pattern counts no digits: too large an amount is refused when "+
		"it is read")
}

// decodes reports whether a string is a T.
func decodes[T any](text string) bool {
	raw, _ := json.Marshal(text)
	var v T
	return json.Unmarshal(raw, &v) == nil
}
