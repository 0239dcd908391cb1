// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	k8sschema "k8s.io/apimachinery/pkg/runtime/schema"
	k8sjson "k8s.io/apimachinery/pkg/util/json"
	yamlreader "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	_ "github.com/pdkit/pdkit/connector/all" // which objects name
	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// install installs the definitions of the groups, all by default.
func install(t testing.TB, c *kubetest.Cluster, of ...string) {
	t.Helper()
	if len(of) == 0 {
		of = groups()
	}
	for _, group := range of {
		manifest, err := os.ReadFile(crdFile(group))
		require.NoError(t, err)
		c.Apply(t, c.Admin(), manifest, "")
	}
}

// objects are the ModelServers of a group in a namespace.
func objects(t testing.TB, c *kubetest.Cluster, group, namespace string) dynamic.ResourceInterface {
	t.Helper()
	client, err := dynamic.NewForConfig(c.Admin())
	require.NoError(t, err)
	return client.Resource(k8sschema.GroupVersionResource{Group: group, Version: "v1alpha1", Resource: "modelservers"}).
		Namespace(namespace)
}

var strict = metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}

// decoded reads YAML, with whole numbers as such.
func decoded(t testing.TB, text []byte) (m tree) {
	t.Helper()
	raw, err := yaml.YAMLToJSONStrict(text)
	require.NoError(t, err)
	require.NoError(t, k8sjson.Unmarshal(raw, &m))
	return m
}

// modelServers returns the ModelServers in a stream of YAML documents. What only a file may say is left out, and who
// has no name gets one.
func modelServers(t testing.TB, stream []byte) (list []*unstructured.Unstructured) {
	t.Helper()
	reader := yamlreader.NewYAMLReader(bufio.NewReader(bytes.NewReader(stream)))
	for {
		doc, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return list
		}
		require.NoError(t, err)
		o := &unstructured.Unstructured{Object: decoded(t, doc)}
		if o.GetKind() != modelserver.Kind {
			continue
		}
		if _, in, _ := unstructured.NestedFieldNoCopy(o.Object, "spec", "discovery", "kubernetes"); !in {
			unstructured.RemoveNestedField(o.Object, "spec", "discovery")
		}
		for _, field := range []string{"kubeconfig", "namespace"} {
			unstructured.RemoveNestedField(o.Object, "spec", "discovery", "kubernetes", field)
		}
		for _, field := range []string{"listen", "ranks"} {
			unstructured.RemoveNestedField(o.Object, "spec", "kvEvents", field)
		}
		if o.GetName() == "" {
			o.SetName(fmt.Sprint("unnamed-", len(list)))
		}
		list = append(list, o)
	}
}

func TestAPIServerAcceptsTheDefinitions(t *testing.T) {
	c := kubetest.Shared(t)
	config := c.Admin()
	warnings := &warnings{}
	config.WarningHandler = warnings
	for _, group := range groups() {
		manifest, err := os.ReadFile(crdFile(group))
		require.NoError(t, err)
		c.Apply(t, config, manifest, "")
	}
	assert.Empty(t, warnings.list)
	client, err := dynamic.NewForConfig(c.Admin())
	require.NoError(t, err)
	definitions := client.Resource(
		k8sschema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1",
			Resource: "customresourcedefinitions"},
	)
	for _, group := range groups() {
		crd, err := definitions.Get(t.Context(), "modelservers."+group, metav1.GetOptions{})
		require.NoError(t, err)
		list, _, err := unstructured.NestedSlice(crd.Object, "status", "conditions")
		require.NoError(t, err)
		conditions := map[any]any{}
		for _, item := range list {
			condition := item.(tree)
			conditions[condition["type"]] = condition["status"]
		}
		assert.Equal(t, map[any]any{"Established": "True", "NamesAccepted": "True"}, conditions,
			"NonStructuralSchema above all is none of them")
	}
}

type warnings struct{ list []string }

func (w *warnings) HandleWarningHeader(_ int, _, text string) { w.list = append(w.list, text) }

func TestKubectlShowsModelAndConnector(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	namespace := c.Namespace(t)
	example, err := os.ReadFile("manifests/examples/proposal-nixl.yaml")
	require.NoError(t, err)
	c.Apply(t, c.Admin(), example, namespace)
	raw, err := c.Client().CoreV1().RESTClient().Get().AbsPath("apis", groups()[0], "v1alpha1", "namespaces", namespace,
		"modelservers").
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").Do(t.Context()).Raw()
	require.NoError(t, err)
	var table metav1.Table
	require.NoError(t, json.Unmarshal(raw, &table))
	var columns []string
	for _, column := range table.ColumnDefinitions {
		columns = append(columns, column.Name)
	}
	assert.Equal(t, []string{"Name", "Model", "Connector", "Age"}, columns)
	require.Len(t, table.Rows, 1)
	assert.Equal(t, []any{"llama2-405b", "llama2-405b", "nixl"}, table.Rows[0].Cells[:3])
}

// TestExamplesAreThoseOfTheDesignDocuments: they are the gateway's too, which were taken from the documents.
func TestExamplesAreThoseOfTheDesignDocuments(t *testing.T) {
	for example, document := range map[string]string{
		"implemented-http": "1-http", "implemented-nixl": "1-nixl", "implemented-lmcache": "1-lmcache",
		"implemented-mooncake": "1-mooncake",
		"proposal-http":        "2-http", "proposal-nixl": "2-nixl", "proposal-lmcache": "2-lmcache",
		"kthena-lmcache": "4-lmcache",
	} {
		want, err := os.ReadFile("../../cmd/gateway/testdata/documents/" + document + ".yaml")
		require.NoError(t, err)
		have, err := os.ReadFile("manifests/examples/" + example + ".yaml")
		require.NoError(t, err)
		assert.Equal(t, string(want), string(have), example)
	}
}

// TestExamplesAreKeptWhole applies each as kubectl does. The schema drops no field of them, adds none and changes none.
func TestExamplesAreKeptWhole(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	files, err := filepath.Glob("manifests/examples/*.yaml")
	require.NoError(t, err)
	require.Len(t, files, 9)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			manifest, err := os.ReadFile(file)
			require.NoError(t, err)
			list := modelServers(t, manifest)
			require.Len(t, list, 1)
			namespace := list[0].GetNamespace()
			if namespace == "" {
				namespace = c.Namespace(t)
			}
			c.Apply(t, c.Admin(), manifest, namespace)
			stored, err := objects(t, c, list[0].GroupVersionKind().Group, namespace).Get(t.Context(),
				list[0].GetName(), metav1.GetOptions{})
			require.NoError(t, err)
			assert.Equal(t, list[0].Object["spec"], stored.Object["spec"])
			assert.EqualValues(t, 1, stored.GetGeneration())
			raw, err := json.Marshal(stored.Object)
			require.NoError(t, err)
			_, err = modelserver.Read(raw)
			assert.NoError(t, err, "what a cluster has is read, with all metadata")
		})
	}
}

// TestWhatAFileMaySayAClusterMaySay creates each ModelServer of the gateway's tests and of the documentation, in both
// groups.
func TestWhatAFileMaySayAClusterMaySay(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	streams := map[string][]byte{}
	for _, pattern := range []string{"../../cmd/gateway/*.yaml", "../../cmd/gateway/testdata/*.yaml",
		"../../cmd/gateway/testdata/documents/*.yaml"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			streams[file], err = os.ReadFile(file)
			require.NoError(t, err)
		}
	}
	pages, err := filepath.Glob("../../connector/*/README.md")
	require.NoError(t, err)
	require.NotEmpty(t, pages)
	block := regexp.MustCompile("(?s)```yaml\n(.*?)```")
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for i, b := range block.FindAllSubmatch(text, -1) {
			if bytes.Contains(b[1], []byte("kind: ModelServer")) {
				streams[fmt.Sprint(page, " ", i)] = b[1]
			}
		}
	}
	require.Greater(t, len(streams), 20)
	for name, stream := range streams {
		namespace := c.Namespace(t)
		for i, o := range modelServers(t, stream) {
			o.SetNamespace(namespace)
			o.SetName(fmt.Sprint("m-", i))
			for _, version := range modelserver.APIVersions() {
				o.SetAPIVersion(version)
				stored, err := objects(t, c, o.GroupVersionKind().Group, namespace).Create(t.Context(), o, strict)
				if assert.NoError(t, err, name) {
					assert.Equal(t, o.Object["spec"], stored.Object["spec"], name)
				}
			}
		}
	}
}

func TestUnknownFieldsAreDroppedOnlyFromWhoDoesNotAsk(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	o := modelServers(t, []byte(minimal))[0]
	o.Object["spec"].(tree)["zone"] = "z"
	list := objects(t, c, groups()[0], c.Namespace(t))
	_, err := list.Create(t.Context(), o, strict)
	require.ErrorContains(t, err, `unknown field "spec.zone"`)
	stored, err := list.Create(t.Context(), o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationIgnore})
	require.NoError(t, err)
	assert.NotContains(t, stored.Object["spec"], "zone")
}

const minimal = `
apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
metadata: {name: m}
spec: {model: m}
`

// TestAPIServerRefuses: what a gateway would refuse is refused when it is written, with the field's name.
func TestAPIServerRefuses(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	list := objects(t, c, groups()[0], c.Namespace(t))
	for name, w := range map[string]struct{ spec, want string }{
		"an unknown field":        {`{kvConnectr: {}}`, `unknown field "spec.kvConnectr"`},
		"a field of another case": {`{kvConnector: {Type: nixl}}`, `unknown field "spec.kvConnector.Type"`},
		"an unknown timeout": {`{kvConnector: {timeouts: {prefil: 1s}}}`,
			`unknown field "spec.kvConnector.timeouts.prefil"`},
		"a field only of files": {`{discovery: {static: {endpoints: []}}}`,
			`unknown field "spec.discovery.static"`},
		"another cluster": {`{discovery: {kubernetes: {kubeconfig: /etc/config}}}`,
			`unknown field "spec.discovery.kubernetes.kubeconfig"`},
		"another namespace": {`{discovery: {kubernetes: {namespace: other}}}`,
			`unknown field "spec.discovery.kubernetes.namespace"`},
		"discovery of nothing": {`{discovery: {}}`, `spec.discovery.kubernetes: Required value`},
		"a number for a model": {`{model: 7}`, `spec.model: Invalid value: "integer"`},
		"a number for a label": {`{workloadSelector: {matchLabels: {app: 7}}}`,
			`spec.workloadSelector.matchLabels.app: Invalid value: "integer"`},
		"a connector's name alone": {`{kvConnector: nixl}`, `spec.kvConnector: Invalid value: "string"`},
		"settings that are a list": {`{kvConnector: {config: []}}`,
			`spec.kvConnector.config: Invalid value: "array"`},
		"a number of seconds": {`{kvConnector: {timeouts: {decode: 30}}}`,
			`spec.kvConnector.timeouts.decode: Invalid value: 30`},
		"a duration without unit": {`{kvConnector: {timeouts: {decode: "30"}}}`,
			`spec.kvConnector.timeouts.decode: Invalid value: "30"`},
		"a unit that Go has not": {`{kvConnector: {timeouts: {decode: 1d}}}`,
			`spec.kvConnector.timeouts.decode: Invalid value: "1d"`},
		"a negative duration": {`{kvConnector: {timeouts: {idle: -1s}}}`,
			`spec.kvConnector.timeouts.idle: Invalid value: "-1s"`},
		"no attempt": {`{kvConnector: {retry: {maxAttempts: 0}}}`,
			`spec.kvConnector.retry.maxAttempts: Invalid value: 0`},
		"half an attempt": {`{kvConnector: {retry: {maxAttempts: 1.5}}}`,
			`spec.kvConnector.retry.maxAttempts: Invalid value: "number"`},
		"backoff upside down": {`{kvConnector: {retry: {backoffBase: 3s, backoffMax: 1500ms}}}`,
			`spec.kvConnector.retry.backoffBase: Invalid value: is longer than backoffMax`},
		"backoff below none": {`{kvConnector: {retry: {backoffBase: 1ns, backoffMax: 0}}}`,
			`spec.kvConnector.retry.backoffBase: Invalid value: is longer than backoffMax`},
		"an unknown unit of bytes": {`{kvConnector: {resources: {maxMemory: 8GB}}}`,
			`spec.kvConnector.resources.maxMemory: Invalid value: "8GB"`},
		"negative bytes": {`{kvConnector: {resources: {maxDisk: -1}}}`,
			`spec.kvConnector.resources.maxDisk: Invalid value: -1`},
		"an unknown fallback": {`{kvConnector: {fallback: decod}}`,
			`spec.kvConnector.fallback: Unsupported value: "decod"`},
		"an unknown policy": {`{kvConnector: {unsupported: reject}}`,
			`spec.kvConnector.unsupported: Unsupported value: "reject"`},
		"a fallback to nothing": {`{kvConnector: {fallback: connector}}`,
			`spec.kvConnector.fallbackConnector: Invalid value: is missing: fallback is connector`},
		"a fallback without use": {`{kvConnector: {fallback: decode, fallbackConnector: {}}}`,
			`spec.kvConnector.fallbackConnector: Invalid value: is given, but fallback is not connector`},
		"a fallback by no word": {`{kvConnector: {fallbackConnector: {type: http}}}`,
			`spec.kvConnector.fallbackConnector: Invalid value: is given, but fallback is not connector`},
		"settings by both names": {`{kvConnector: {config: {}, parameters: {}}}`,
			`spec.kvConnector.parameters: Invalid value: is given besides config`},
		"a fault in a fallback": {`{kvConnector: {fallback: connector, fallbackConnector: {retry: ` +
			`{maxAttempts: 0}}}}`, `spec.kvConnector.fallbackConnector.retry.maxAttempts: Invalid value: 0`},
		"a fault in the second fallback": {`{kvConnector: {fallback: connector, fallbackConnector: {fallback: ` +
			`connector, fallbackConnector: {fallback: connector}}}}`,
			`spec.kvConnector.fallbackConnector.fallbackConnector.fallbackConnector: Invalid value: is missing`},
		"a fault in a rollout": {`{rollout: {weight: 1, kvConnector: {fallback: connector}}}`,
			`spec.rollout.kvConnector.fallbackConnector: Invalid value: is missing`},
		"a negative weight": {`{rollout: {weight: -1, kvConnector: {}}}`,
			`spec.rollout.weight: Invalid value: -1`},
		"more than all": {`{rollout: {weight: 101, kvConnector: {}}}`,
			`spec.rollout.weight: Invalid value: 101`},
		"a rollout without a share": {`{rollout: {kvConnector: {}}}`, `spec.rollout.weight: Required value`},
		"a rollout of nothing":      {`{rollout: {weight: 1}}`, `spec.rollout.kvConnector: Required value`},
		"an encoder without a type": {`{encoder: {}}`, `spec.encoder.type: Required value`},
		"an unknown encoder": {`{encoder: {type: exampel}}`,
			`spec.encoder.type: Unsupported value: "exampel"`},
		"a port beyond all": {`{workloadPort: {port: 70000}}`,
			`spec.workloadPort.port: Invalid value: 70000`},
		"a negative port": {`{discovery: {kubernetes: {port: -1}}}`,
			`spec.discovery.kubernetes.port: Invalid value: -1`},
		"no spec": {``, `spec: Required value`},
	} {
		t.Run(name, func(t *testing.T) {
			o := modelServers(t, []byte(minimal))[0]
			unstructured.RemoveNestedField(o.Object, "spec")
			if w.spec != "" {
				o.Object["spec"] = decoded(t, []byte(w.spec))
			}
			_, err := list.Create(t.Context(), o, strict)
			require.ErrorContains(t, err, w.want)
			assert.True(t, apierrors.IsInvalid(err) || apierrors.IsBadRequest(err))
			raw, err := json.Marshal(o.Object)
			require.NoError(t, err)
			_, err = modelserver.Read(raw)
			if strings.HasPrefix(name, "another ") { // cluster or namespace: a file may lead there
				return
			}
			assert.Error(t, err, "the API server is no stricter than who reads the object")
		})
	}
}
