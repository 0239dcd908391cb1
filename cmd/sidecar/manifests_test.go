// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// The types below have the fields of other projects' objects that the manifests use, and no other. A manifest with a
// field that is not here is refused, as by the real definitions.

// inferencePool: kubernetes-sigs/gateway-api-inference-extension@84436a9, config/crd/bases.
type inferencePool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Selector          struct{ MatchLabels map[string]string }
		TargetPorts       []struct{ Number int32 }
		EndpointPickerRef struct {
			Name        string
			Port        struct{ Number int32 }
			FailureMode string
		}
	}
}

// llmService is an LLMInferenceService and an LLMInferenceServiceConfig: kserve/kserve@aaac4e2,
// pkg/apis/serving/v1alpha2/llm_inference_service_types.go.
type llmService struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		BaseRefs []corev1.LocalObjectReference
		Model    struct{ URI, Name string }
		Router   struct{ Route, Gateway, Scheduler *struct{} }
		Replicas *int32
		Template *corev1.PodSpec
		Prefill  *struct {
			Replicas *int32
			Template *corev1.PodSpec
		}
	}
}

// kustomization: kubernetes-sigs/kustomize, api/types/kustomization.go.
type kustomization struct {
	metav1.TypeMeta `json:",inline"`
	Resources       []string
	Patches         []struct {
		Path   string
		Target struct{ Kind, Name string }
	}
}

// objects are the documents of a manifest by kind and name.
type objects map[string]any

// readManifest reads a manifest. It fails at a kind that it does not know, and at a field that a kind does not have.
func readManifest(t *testing.T, name string) objects {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("manifests", name))
	require.NoError(t, err)
	read := objects{}
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return read
		}
		require.NoError(t, err)
		var head metav1.PartialObjectMetadata
		require.NoError(t, yaml.Unmarshal(document, &head), name)
		object, known := map[string]any{
			"v1/ServiceAccount":                                    &corev1.ServiceAccount{},
			"v1/Service":                                           &corev1.Service{},
			"apps/v1/Deployment":                                   &appsv1.Deployment{},
			"rbac.authorization.k8s.io/v1/Role":                    &rbacv1.Role{},
			"rbac.authorization.k8s.io/v1/RoleBinding":             &rbacv1.RoleBinding{},
			"inference.networking.k8s.io/v1/InferencePool":         &inferencePool{},
			"serving.kserve.io/v1alpha2/LLMInferenceService":       &llmService{},
			"serving.kserve.io/v1alpha2/LLMInferenceServiceConfig": &llmService{},
			"kustomize.config.k8s.io/v1beta1/Kustomization":        &kustomization{},
		}[head.APIVersion+"/"+head.Kind]
		require.True(t, known, "%s: %s/%s", name, head.APIVersion, head.Kind)
		require.NoError(t, yaml.UnmarshalStrict(document, object), "%s: %s %s", name, head.Kind, head.Name)
		read[strings.TrimSpace(head.Kind+" "+head.Name)] = object
	}
}

// get returns an object of a manifest by its kind and name.
func get[T any](t *testing.T, from objects, name string) T {
	t.Helper()
	object, ok := from[name].(T)
	require.True(t, ok, "no %s", name)
	return object
}

// container returns a container of a list by its name.
func container(t *testing.T, list []corev1.Container, name string) *corev1.Container {
	t.Helper()
	i := slices.IndexFunc(list, func(c corev1.Container) bool { return c.Name == name })
	require.GreaterOrEqual(t, i, 0, "no container %s", name)
	return &list[i]
}

// merged applies a strategic merge patch, as kubectl patch, kustomize and KServe's controller do.
func merged[T any](t *testing.T, base, patch *T) *T {
	t.Helper()
	b, err := json.Marshal(base)
	require.NoError(t, err)
	p, err := json.Marshal(patch)
	require.NoError(t, err)
	empty, err := json.Marshal(new(T))
	require.NoError(t, err)
	p, err = strategicpatch.CreateTwoWayMergePatch(empty, p, new(T)) // without the fields that the patch does not have
	require.NoError(t, err)
	b, err = strategicpatch.StrategicMergePatch(b, p, new(T))
	require.NoError(t, err)
	out := new(T)
	require.NoError(t, json.Unmarshal(b, out))
	return out
}

// decodeOfLLMD is the decode pod of the whole manifest for llm-d.
func decodeOfLLMD(t *testing.T) *corev1.PodSpec {
	t.Helper()
	return &get[*appsv1.Deployment](t, readManifest(t, "llm-d.yaml"), "Deployment decode").Spec.Template.Spec
}

// llm-d's scheduler finds the pods by the labels of the manifest, and their roles by llm-d.ai/role.
func TestTheManifestForLLMDFitsItsScheduler(t *testing.T) {
	m := readManifest(t, "llm-d.yaml")
	pool := get[*inferencePool](t, m, "InferencePool pd-disaggregation").Spec
	for _, role := range []string{"prefill", "decode"} {
		d := get[*appsv1.Deployment](t, m, "Deployment "+role)
		labels := d.Spec.Template.Labels
		assert.Equal(t, role, labels["llm-d.ai/role"])
		assert.Subset(t, labels, pool.Selector.MatchLabels)
		assert.Subset(t, labels, d.Spec.Selector.MatchLabels)
	}
	decode := decodeOfLLMD(t)
	side := container(t, decode.InitContainers, "routing-proxy")
	assert.Empty(t, side.ImagePullPolicy, "an image with a tag other than latest is pulled if the node lacks it")
	prefill := get[*appsv1.Deployment](t, m, "Deployment prefill").Spec.Template.Spec.Containers[0]
	assert.Equal(t, pool.TargetPorts[0].Number, side.Ports[0].ContainerPort)
	assert.Equal(t, pool.TargetPorts[0].Number, prefill.Ports[0].ContainerPort)
	assert.Equal(t, corev1.ContainerRestartPolicyAlways, *side.RestartPolicy)
	assert.Contains(t, side.Args, "--inference-pool=$(POD_NAMESPACE)/pd-disaggregation")
	assert.Equal(t, decode.ServiceAccountName, get[*rbacv1.RoleBinding](t, m, "RoleBinding decode").Subjects[0].Name)
}

// The overlay changes the decode Deployment of a guide: its sidecar is pdkit's, and all else stays.
func TestTheOverlayForLLMDChangesTheSidecarAlone(t *testing.T) {
	k := get[*kustomization](t, readManifest(t, "llm-d-overlay/kustomization.yaml"), "Kustomization")
	assert.Equal(t, []string{"../guide", "prefillers.yaml"}, k.Resources)
	require.Len(t, k.Patches, 1)
	before, after := guide(), overlaid(t, k.Patches[0].Path)
	assert.Equal(t, "pdkit-sidecar:0.1.0", container(t, after.InitContainers, "routing-proxy").Image)
	was, is := before.InitContainers[0], after.InitContainers[0]
	assert.Equal(t, corev1.PullIfNotPresent, is.ImagePullPolicy, "an image that was loaded into the nodes counts")
	was.Image, was.Args, is.Image, is.Args = "", nil, "", nil
	was.ImagePullPolicy, is.ImagePullPolicy = "", ""
	assert.Equal(t, was, is)
	assert.Equal(t, before.Containers, after.Containers)
	s := get[*corev1.Service](t, readManifest(t, "llm-d-overlay/prefillers.yaml"), "Service prefillers")
	assert.Equal(t, corev1.ClusterIPNone, s.Spec.ClusterIP)
	assert.True(t, s.Spec.PublishNotReadyAddresses)
}

// The patch in README.md for a LeaderWorkerSet, whose object is not read here, changes what the overlay changes.
func TestThePatchForALeaderWorkerSetIsThatOfTheOverlay(t *testing.T) {
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	_, block, found := strings.Cut(string(text), "```yaml\n")
	require.True(t, found)
	block, _, _ = strings.Cut(block, "```")
	var k struct{ Patches []struct{ Patch string } }
	require.NoError(t, yaml.Unmarshal([]byte(block), &k))
	require.Len(t, k.Patches, 1)
	var operations []struct{ Op, Path, Value string }
	require.NoError(t, yaml.UnmarshalStrict([]byte(k.Patches[0].Patch), &operations))
	got := map[string]string{}
	for _, o := range operations {
		field, below := strings.CutPrefix(o.Path, "/spec/leaderWorkerTemplate/workerTemplate/spec/initContainers/0/")
		assert.True(t, below, o.Path)
		got[o.Op+" "+field] = o.Value
	}
	want := container(t, overlaid(t, "sidecar.yaml").InitContainers, "routing-proxy")
	assert.Equal(t, map[string]string{
		"replace image":       want.Image,
		"add imagePullPolicy": string(want.ImagePullPolicy), // whether there is one or not
		"add args/-":          "--prefillers-dns=prefillers:8000-8007",
	}, got)
}

// guide is what the decode pods of llm-d's guides have (the sources are in the manifests), as far as it matters here.
func guide() *corev1.PodSpec {
	always := corev1.ContainerRestartPolicyAlways
	return &corev1.PodSpec{
		InitContainers: []corev1.Container{{
			Name: "routing-proxy", Image: "llm-d", ImagePullPolicy: corev1.PullAlways, RestartPolicy: &always,
			Args:  manifests["guide pd"].args,
			Ports: []corev1.ContainerPort{{Name: "sidecar", ContainerPort: 8000}},
		}},
		Containers: []corev1.Container{{
			Name: "modelserver", Image: "vllm",
			Ports:         []corev1.ContainerPort{{Name: "modelserver", ContainerPort: 8200}},
			LivenessProbe: probe("/health", "modelserver"), ReadinessProbe: probe("/v1/models", "modelserver"),
		}},
		TerminationGracePeriodSeconds: new(int64(75)),
	}
}

// overlaid is a guide's pod with the overlay's patch.
func overlaid(t *testing.T, patch string) *corev1.PodSpec {
	t.Helper()
	d := get[*appsv1.Deployment](t, readManifest(t, "llm-d-overlay/"+patch), "Deployment decode")
	return merged(t, guide(), &d.Spec.Template.Spec)
}

func probe(path, port string) *corev1.Probe {
	return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{
		HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.Parse(port)}}}
}

// preset is what KServe's preset of decode pods has (kserve/kserve@aaac4e2, config/llmisvcconfig/
// config-llm-decode-template.yaml), as far as it matters here, with what its controller adds (pkg/controller/v1alpha2/
// llmisvc/workload_single_node.go).
func preset(tls bool) *corev1.PodSpec {
	always := corev1.ContainerRestartPolicyAlways
	arguments, scheme := manifests["KServe 0.20 without TLS"], corev1.URISchemeHTTP
	if tls {
		arguments, scheme = manifests["KServe 0.20 with TLS"], corev1.URISchemeHTTPS
	}
	healthy := func(port string) *corev1.Probe {
		p := probe("/health", port)
		p.HTTPGet.Scheme = scheme
		return p
	}
	return &corev1.PodSpec{
		InitContainers: []corev1.Container{{
			Name: "llm-d-routing-sidecar", Image: "llm-d", ImagePullPolicy: corev1.PullIfNotPresent,
			RestartPolicy: &always,
			Command:       append([]string{"/app/pd-sidecar"}, arguments.args...),
			Ports:         []corev1.ContainerPort{{ContainerPort: 8000}},
			Env: []corev1.EnvVar{
				{Name: "INFERENCE_POOL_NAMESPACE", ValueFrom: &corev1.EnvVarSource{
					FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.namespace"}}},
				{Name: "SSL_CERT_DIR",
					Value: "/var/run/kserve/tls:/var/run/secrets/kubernetes.io/serviceaccount:/etc/pki/tls/certs"},
				{Name: "INFERENCE_POOL_NAME", Value: "pool"},
			},
			LivenessProbe: healthy("8000"), ReadinessProbe: healthy("8000"),
		}},
		Containers: []corev1.Container{{
			Name: "main", Image: "vllm", Ports: []corev1.ContainerPort{{ContainerPort: 8001}},
			LivenessProbe: healthy("8001"), ReadinessProbe: healthy("8001"),
		}},
		TerminationGracePeriodSeconds: new(int64(60)),
	}
}

// KServe's controller merges the preset, the configurations of baseRefs and the service, in this order. The sidecar
// gets another image, in which the preset's command is pdkit's sidecar (cmd/images). All else stays the preset's.
func TestTheConfigurationForKServeChangesTheImageAlone(t *testing.T) {
	for _, tls := range []bool{true, false} {
		before, after := preset(tls), configured(t, tls)
		was, is := before.InitContainers[0], after.InitContainers[0]
		assert.Equal(t, "pdkit-sidecar:0.1.0", is.Image)
		assert.Equal(t, "/app/pd-sidecar", is.Command[0], "the image's link")
		assert.NotEqual(t, corev1.PullAlways, is.ImagePullPolicy, "an image that was loaded into the nodes counts")
		was.Image, is.Image = "", ""
		assert.Equal(t, was, is, "TLS: %t", tls)
		require.Len(t, after.InitContainers, 1)
		require.Len(t, after.Containers, 1)
		assert.Equal(t, before.Containers[0].LivenessProbe, after.Containers[0].LivenessProbe)
	}
	service := get[*llmService](t, readManifest(t, "kserve.yaml"), "LLMInferenceService qwen")
	assert.Equal(t, []corev1.LocalObjectReference{{Name: "pdkit-sidecar"}}, service.Spec.BaseRefs)
	assert.Equal(t, "main", service.Spec.Prefill.Template.Containers[0].Name, "the preset's name")
}

// configured is a decode pod that KServe makes of its preset and the manifest.
func configured(t *testing.T, tls bool) *corev1.PodSpec {
	t.Helper()
	m := readManifest(t, "kserve.yaml")
	pod := preset(tls)
	for _, name := range []string{"LLMInferenceServiceConfig pdkit-sidecar", "LLMInferenceService qwen"} {
		pod = merged(t, pod, get[*llmService](t, m, name).Spec.Template)
	}
	return pod
}

// Kubernetes gives a pod one time for all of its end, and the sidecar's own limit fits into it.
func TestTheDrainFitsIntoThePodsTime(t *testing.T) {
	for name, pod := range map[string]*corev1.PodSpec{"llm-d": decodeOfLLMD(t), "KServe": configured(t, true),
		"llm-d-overlay": overlaid(t, "sidecar.yaml")} {
		assert.LessOrEqual(t, drainTimeout, time.Duration(*pod.TerminationGracePeriodSeconds)*time.Second, name)
	}
}
