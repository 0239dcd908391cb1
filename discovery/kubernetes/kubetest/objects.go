// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	yamlreader "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"
)

// NodeName is the node of pods that name none. The node exists and has no zone.
const NodeName = "node"

// Apply does what [Cluster.TryApply] does, and fails the test on an error.
func (c *Cluster) Apply(t testing.TB, config *rest.Config, manifest []byte, namespace string) {
	t.Helper()
	require.NoError(t, c.TryApply(t.Context(), config, manifest, namespace))
}

// TryApply applies the documents of a YAML file in their order, as kubectl apply --server-side -n namespace does.
// Fields that the schema does not know are refused. Objects without a namespace get this one. When TryApply returns, a
// CustomResourceDefinition can be used. It stops at the first error and returns it as the API server sent it, so that
// apierrors.IsInvalid and the like apply.
func (c *Cluster) TryApply(ctx context.Context, config *rest.Config, manifest []byte, namespace string) error {
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	reader := yamlreader.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifest)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(document, &object.Object); err != nil {
			return err
		}
		if len(object.Object) == 0 {
			continue // a document of comments only
		}
		if err := c.applyOne(ctx, config, client, object, namespace); err != nil {
			return fmt.Errorf("%s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
}

func (c *Cluster) applyOne(ctx context.Context, config *rest.Config, client dynamic.Interface,
	object *unstructured.Unstructured, namespace string) error {
	mapping, err := mappingOf(config, object)
	if err != nil {
		return err
	}
	var resource dynamic.ResourceInterface = client.Resource(mapping.Resource)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		if object.GetNamespace() == "" {
			object.SetNamespace(namespace)
		}
		resource = client.Resource(mapping.Resource).Namespace(object.GetNamespace())
	}
	_, err = resource.Apply(ctx, object.GetName(), object, metav1.ApplyOptions{FieldManager: "kubetest", Force: true})
	if err != nil || object.GetKind() != "CustomResourceDefinition" {
		return err
	}
	return poll(ctx, func(ctx context.Context) (bool, error) { return served(ctx, config, resource, object.GetName()) })
}

// mappingOf asks the API server for an object's resource.
func mappingOf(config *rest.Config, object *unstructured.Unstructured) (*meta.RESTMapping, error) {
	client, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, err
	}
	groups, err := restmapper.GetAPIGroupResources(client)
	if err != nil {
		return nil, err
	}
	kind := object.GroupVersionKind()
	return restmapper.NewDiscoveryRESTMapper(groups).RESTMapping(kind.GroupKind(), kind.Version)
}

// served reports whether the API server serves the objects of a definition. That happens a little after the definition
// is Established.
func served(ctx context.Context, config *rest.Config, definitions dynamic.ResourceInterface, name string) (bool,
	error) {
	object, err := definitions.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	data, err := json.Marshal(object.Object)
	if err != nil {
		return false, err
	}
	var definition struct {
		Spec struct {
			Group    string
			Names    struct{ Kind, Plural string }
			Versions []struct {
				Name   string
				Served bool
			}
		}
		Status struct {
			Conditions []metav1.Condition
		}
	}
	if err := json.Unmarshal(data, &definition); err != nil {
		return false, err
	}
	if !meta.IsStatusConditionTrue(definition.Status.Conditions, "Established") {
		return false, nil
	}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return false, err
	}
	for _, version := range definition.Spec.Versions {
		if !version.Served {
			continue
		}
		group := schema.GroupVersion{Group: definition.Spec.Group, Version: version.Name}
		example := &unstructured.Unstructured{}
		example.SetGroupVersionKind(group.WithKind(definition.Spec.Names.Kind))
		if _, err := mappingOf(config, example); err != nil {
			return false, ignore(err, meta.IsNoMatchError)
		}
		_, err := client.Resource(group.WithResource(definition.Spec.Names.Plural)).List(ctx,
			metav1.ListOptions{Limit: 1})
		if err != nil {
			return false, ignore(err, apierrors.IsNotFound)
		}
	}
	return true, nil
}

func ignore(err error, is func(error) bool) error {
	if is(err) {
		return nil
	}
	return err
}

func poll(ctx context.Context, done wait.ConditionWithContextFunc) error {
	return wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, patience, true, done)
}

// Node creates a node until the end of the test, in the given zone unless that is "". Its name must be unique in the
// cluster. The API server (since Kubernetes 1.35) copies the node's zone into the label topology.kubernetes.io/zone of
// pods that are created later.
func (c *Cluster) Node(t testing.TB, name, zone string) {
	t.Helper()
	require.NoError(t, c.node(t.Context(), name, zone))
	t.Cleanup(func() { _ = c.client.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}) })
}

func (c *Cluster) node(ctx context.Context, name, zone string) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if zone != "" {
		node.Labels = map[string]string{corev1.LabelTopologyZone: zone}
	}
	_, err := c.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	return err
}

// Pod creates a pod on the node [NodeName], with one container that has the given ports. Until [Cluster.SetPod] it is
// pending and has no address.
func (c *Cluster) Pod(t testing.TB, namespace, name string, labels, annotations map[string]string,
	ports ...corev1.ContainerPort) *corev1.Pod {
	t.Helper()
	return c.CreatePod(t, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels, Annotations: annotations},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "engine", Ports: ports}}},
	})
}

// CreatePod creates a pod, on the node [NodeName] if it names none.
func (c *Cluster) CreatePod(t testing.TB, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	pod = pod.DeepCopy()
	if pod.Spec.NodeName == "" {
		pod.Spec.NodeName = NodeName
	}
	created, err := c.client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	require.NoError(t, err)
	return created
}

// SetPod plays the kubelet: the pod runs, has the address ip ("" for none), and is ready or not. Addresses of
// 127.0.0.0/8 are accepted here, but refused in EndpointSlices.
func (c *Cluster) SetPod(t testing.TB, namespace, name, ip string, ready bool) {
	t.Helper()
	status := map[string]any{"phase": corev1.PodRunning, "podIP": nil, "podIPs": nil}
	if ip != "" {
		status["podIP"], status["podIPs"] = ip, []corev1.PodIP{{IP: ip}}
	}
	condition := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse}
	if ready {
		condition.Status = corev1.ConditionTrue
	}
	status["conditions"] = []corev1.PodCondition{condition}
	c.patch(t, namespace, name, map[string]any{"status": status}, "status")
}

// SetLabels sets labels of a pod; the others stay. An empty value removes the label.
func (c *Cluster) SetLabels(t testing.TB, namespace, name string, labels map[string]string) {
	t.Helper()
	c.patch(t, namespace, name, map[string]any{"metadata": map[string]any{"labels": removable(labels)}})
}

// SetAnnotations is [Cluster.SetLabels] for annotations.
func (c *Cluster) SetAnnotations(t testing.TB, namespace, name string, annotations map[string]string) {
	t.Helper()
	c.patch(t, namespace, name, map[string]any{"metadata": map[string]any{"annotations": removable(annotations)}})
}

func removable(values map[string]string) map[string]any {
	patch := make(map[string]any, len(values))
	for k, v := range values {
		if patch[k] = v; v == "" {
			patch[k] = nil
		}
	}
	return patch
}

func (c *Cluster) patch(t testing.TB, namespace, name string, patch any, subresource ...string) {
	t.Helper()
	data, err := json.Marshal(patch)
	require.NoError(t, err)
	_, err = c.client.CoreV1().Pods(namespace).Patch(t.Context(), name, types.MergePatchType, data,
		metav1.PatchOptions{}, subresource...)
	require.NoError(t, err)
}

// DeletePod deletes a pod. With a grace of some seconds it stays, and is terminating, as nobody tells of its end; 0
// removes it.
func (c *Cluster) DeletePod(t testing.TB, namespace, name string, grace int64) {
	t.Helper()
	err := c.client.CoreV1().Pods(namespace).Delete(t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &grace})
	require.NoError(t, err)
}
