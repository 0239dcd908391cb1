// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	k8sschema "k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// watched is a watch, and all that it has reported, in order.
type watched struct {
	lists  chan []ModelServer
	faults chan error

	mu  sync.Mutex
	all [][]ModelServer
}

// watchModelServers watches until the end of the test, with definitions that are not there looked for at short
// intervals, and faults told at once.
func watchModelServers(t testing.TB, o ModelServerOptions, also ...func(*ModelServers)) *watched {
	t.Helper()
	w := &watched{lists: make(chan []ModelServer, 10_000), faults: make(chan error, 10_000)}
	o.OnError = func(err error) { w.faults <- err }
	m, err := NewModelServers(&o)
	require.NoError(t, err)
	m.absent, m.confirm, m.patience = 100*time.Millisecond, 10*time.Millisecond, 0
	for _, set := range also {
		set(m)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- m.Watch(ctx, func(list []ModelServer) {
			w.mu.Lock()
			w.all = append(w.all, list)
			w.mu.Unlock()
			w.lists <- list
		})
	}()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-ended)
	})
	return w
}

// next returns the next list.
func (w *watched) next(t testing.TB) []ModelServer {
	t.Helper()
	return receive(t, w.lists)
}

func (w *watched) fault(t testing.TB) error {
	t.Helper()
	return receive(t, w.faults)
}

func receive[T any](t testing.TB, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(2 * time.Minute):
		require.Fail(t, "nothing came")
		panic("unreachable")
	}
}

// shown writes a list as GROUP/NAME=MODEL, with the first part of the group only.
func shown(list []ModelServer) string {
	var out []string
	for _, s := range list {
		var o struct{ Spec struct{ Model string } }
		_ = json.Unmarshal(s.Object, &o)
		out = append(out, strings.Split(s.Group, ".")[1]+"/"+s.Name+"="+o.Spec.Model)
	}
	return strings.Join(out, " ")
}

// until returns the first list that is shown as want. Lists before it are those of a change that is not over yet.
func (w *watched) until(t testing.TB, want string) []ModelServer {
	t.Helper()
	var last string
	deadline := time.After(2 * time.Minute)
	for {
		select {
		case list := <-w.lists:
			if last = shown(list); last == want {
				return list
			}
		case <-deadline:
			require.Equal(t, want, last)
		}
	}
}

func newObject(group, name, model string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: tree{
		"apiVersion": group + "/v1alpha1", "kind": modelserver.Kind, "metadata": tree{"name": name},
		"spec": tree{"model": model},
	}}
}

func create(t testing.TB, in dynamic.ResourceInterface, o *unstructured.Unstructured) *unstructured.Unstructured {
	t.Helper()
	stored, err := in.Create(t.Context(), o, strict)
	require.NoError(t, err)
	return stored
}

func patch(t testing.TB, in dynamic.ResourceInterface, name, text string, subresource ...string) {
	t.Helper()
	_, err := in.Patch(t.Context(), name, types.MergePatchType, []byte(text),
		metav1.PatchOptions{FieldValidation: metav1.FieldValidationStrict}, subresource...)
	require.NoError(t, err)
}

func remove(t testing.TB, in dynamic.ResourceInterface, name string) {
	t.Helper()
	require.NoError(t, in.Delete(t.Context(), name, metav1.DeleteOptions{}))
}

func TestModelServersComeChangeAndGoInBothGroups(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	namespace, other := c.Namespace(t), c.Namespace(t)
	first, second := objects(t, c, groups()[0], namespace), objects(t, c, groups()[1], namespace)
	o := newObject(groups()[0], "b", "one")
	o.SetLabels(map[string]string{"team": "x"})
	o.Object["spec"].(tree)["kvConnector"] = tree{"type": "nixl",
		"config": tree{"port": int64(7777), "text": "<&>"}}
	stored := create(t, first, o)
	w := watchModelServers(t, ModelServerOptions{Config: c.Admin(), Namespace: namespace})

	list := w.next(t)
	require.Len(t, list, 1)
	assert.JSONEq(t, fmt.Sprintf(`{"apiVersion": "networking.matrixinfer.ai/v1alpha1", "kind": "ModelServer",
		"metadata": {"name": "b", "namespace": %q},
		"spec": {"model": "one", "kvConnector": {"type": "nixl", "config": {"port": 7777, "text": "<&>"}}}}`,
		namespace), string(list[0].Object))
	list[0].Object = nil
	assert.Equal(t, ModelServer{
		Group: groups()[0], Namespace: namespace, Name: "b", UID: string(stored.GetUID()), Generation: 1,
		ResourceVersion: stored.GetResourceVersion(),
	}, list[0])

	create(t, objects(t, c, groups()[0], other), newObject(groups()[0], "z", "elsewhere"))
	create(t, second, newObject(groups()[1], "a", "two"))
	assert.Equal(t, "serving/a=two matrixinfer/b=one", shown(w.next(t)),
		"sorted by name, and nothing of another namespace")
	create(t, second, newObject(groups()[1], "b", "three"))
	assert.Equal(t, "serving/a=two matrixinfer/b=one serving/b=three", shown(w.next(t)),
		"who is right is not for a watch to say")
	patch(t, second, "b", `{"spec": {"model": "four"}}`)
	list = w.next(t)
	assert.Equal(t, "serving/a=two matrixinfer/b=one serving/b=four", shown(list))
	assert.EqualValues(t, 2, list[2].Generation)
	remove(t, first, "b")
	assert.Equal(t, "serving/a=two serving/b=four", shown(w.next(t)))
	remove(t, second, "a")
	assert.Equal(t, "serving/b=four", shown(w.next(t)))
	remove(t, second, "b")
	list = w.next(t)
	assert.NotNil(t, list)
	assert.Empty(t, list)
	assert.Empty(t, w.faults)
}

func TestOnlyAnotherSpecIsNews(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	namespace := c.Namespace(t)
	in := objects(t, c, groups()[0], namespace)
	old := create(t, in, newObject(groups()[0], "a", "one"))
	w := watchModelServers(t, ModelServerOptions{Config: c.Admin(), Namespace: namespace})
	assert.Equal(t, "matrixinfer/a=one", shown(w.next(t)))

	patch(t, in, "a", `{"status": {"readyReplicas": 3}}`, "status")
	patch(t, in, "a", `{"metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}}}`)
	patch(t, in, "a", `{"spec": {"model": "one"}}`)
	create(t, in, newObject(groups()[0], "b", "two"))
	assert.Equal(t, "matrixinfer/a=one matrixinfer/b=two", shown(w.next(t)), "the next list is of the next change")

	remove(t, in, "a")
	assert.Equal(t, "matrixinfer/b=two", shown(w.next(t)))
	create(t, in, newObject(groups()[0], "a", "one"))
	list := w.next(t)
	assert.Equal(t, "matrixinfer/a=one matrixinfer/b=two", shown(list))
	assert.NotEqual(t, string(old.GetUID()), list[0].UID, "another object of the same name is known by its UID")
}

func TestAWatchThatTheServerEndsMissesNothing(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	namespace := c.Namespace(t)
	in := objects(t, c, groups()[0], namespace)
	config := c.Admin()
	var watches atomic.Int64
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.URL.Query().Has("watch") {
				watches.Add(1)
			}
			return next.RoundTrip(r)
		})
	})
	create(t, in, newObject(groups()[0], "a", "0"))
	w := watchModelServers(t, ModelServerOptions{Config: config, Namespace: namespace, Groups: groups()[:1]},
		func(m *ModelServers) { m.length = time.Second })
	for i := 1; watches.Load() < 4; i++ {
		patch(t, in, "a", fmt.Sprintf(`{"spec": {"model": "%d"}}`, i))
		w.until(t, fmt.Sprint("matrixinfer/a=", i))
	}
	assert.Empty(t, w.faults, "the end of a watch is no fault")
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestAnAPIServerThatDiesTakesNothingAway(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t)
	install(t, c)
	namespace := c.Namespace(t)
	first, second := objects(t, c, groups()[0], namespace), objects(t, c, groups()[1], namespace)
	create(t, first, newObject(groups()[0], "a", "one"))
	w := watchModelServers(t, ModelServerOptions{Config: c.Admin(), Namespace: namespace})
	w.until(t, "matrixinfer/a=one")
	c.KillAPIServer()
	assert.ErrorContains(t, w.fault(t), "kubernetes: the API server does not answer")
	c.StartAPIServer(t)
	create(t, first, newObject(groups()[0], "b", "two"))
	create(t, second, newObject(groups()[1], "b", "three"))
	w.until(t, "matrixinfer/a=one matrixinfer/b=two serving/b=three")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, list := range w.all {
		assert.Contains(t, shown(list), "matrixinfer/a=one", "no list is without what is there")
	}
	for len(w.faults) > 0 {
		assert.ErrorContains(t, <-w.faults, "the API server does not answer",
			"and an API server that starts is no other fault")
	}
}

func TestDefinitionsComeAndGo(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t)
	w := watchModelServers(t, ModelServerOptions{Config: c.Admin()})
	const none = "kubernetes: no ModelServer definition is installed, in networking.matrixinfer.ai or " +
		"networking.serving.volcano.sh"
	require.EqualError(t, w.fault(t), none)
	list := w.next(t)
	assert.NotNil(t, list)
	assert.Empty(t, list, "no definition means no objects")

	second := objects(t, c, groups()[1], "default")
	install(t, c, groups()[1])
	create(t, second, newObject(groups()[1], "b", "two"))
	w.until(t, "serving/b=two")
	install(t, c, groups()[0])
	create(t, objects(t, c, groups()[0], "default"), newObject(groups()[0], "a", "one"))
	w.until(t, "matrixinfer/a=one serving/b=two")

	uninstall(t, c, groups()[0])
	w.until(t, "serving/b=two")
	assert.Empty(t, w.faults, "one definition is enough")
	install(t, c, groups()[0])
	create(t, objects(t, c, groups()[0], "default"), newObject(groups()[0], "c", "three"))
	w.until(t, "serving/b=two matrixinfer/c=three")

	uninstall(t, c, groups()[0])
	uninstall(t, c, groups()[1])
	w.until(t, "")
	require.EqualError(t, w.fault(t), none, "it is told again")
	assert.Empty(t, w.faults)
}

// uninstall deletes a definition, and with it its objects.
func uninstall(t testing.TB, c *kubetest.Cluster, group string) {
	t.Helper()
	client, err := dynamic.NewForConfig(c.Admin())
	require.NoError(t, err)
	crds := client.Resource(
		k8sschema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1",
			Resource: "customresourcedefinitions"},
	)
	remove(t, crds, "modelservers."+group)
	require.Eventually(t, func() bool {
		_, err := crds.Get(t.Context(), "modelservers."+group, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	}, 2*time.Minute, 20*time.Millisecond)
}

func TestDeniedVerbsAreNamed(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	namespace := c.Namespace(t)
	config := c.ServiceAccount(t, namespace, "gateway")
	create(t, objects(t, c, groups()[0], namespace), newObject(groups()[0], "a", "one"))
	w := watchModelServers(t, ModelServerOptions{Config: config, Namespace: namespace, Groups: groups()[:1]})
	const of = "modelservers.networking.matrixinfer.ai"
	require.EqualError(t, w.fault(t), denied("list "+of, namespace, "there is no list yet"))
	assert.Empty(t, w.lists, "nothing is known, which is not the same as an empty list")

	roles := c.Client().RbacV1().Roles(namespace)
	role := &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: "gateway"},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: groups(), Resources: []string{"modelservers"}, Verbs: []string{"list"}},
		},
	}
	role, err := roles.Create(t.Context(), role, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = c.Client().RbacV1().RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "gateway"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "gateway"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: "gateway"}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	w.until(t, "matrixinfer/a=one")
	require.EqualError(t, w.fault(t), denied("watch "+of, namespace, "the last list stays"))
	patch(t, objects(t, c, groups()[0], namespace), "a", `{"spec": {"model": "two"}}`)
	w.until(t, "matrixinfer/a=two") // by lists alone

	role.Rules[0].Verbs = []string{"list", "watch"}
	_, err = roles.Update(t.Context(), role, metav1.UpdateOptions{})
	require.NoError(t, err)
	patch(t, objects(t, c, groups()[0], namespace), "a", `{"spec": {"model": "three"}}`)
	w.until(t, "matrixinfer/a=three")
	assert.Empty(t, w.faults, "each is told once")
}

// denied is the fault of a verb with a resource, and what follows from it.
func denied(call, namespace, so string) string {
	return fmt.Sprintf("kubernetes: not allowed to %s in namespace %q: see manifests/rbac.yaml (%s)", call, namespace,
		so)
}

func TestModelServerOptions(t *testing.T) {
	config := &rest.Config{Host: "https://127.0.0.1:1"}
	for want, o := range map[string]*ModelServerOptions{
		"kubernetes: ModelServerOptions.Config is missing": {},
		`kubernetes: "a/b" is not a namespace`:             {Config: config, Namespace: "a/b"},
		`kubernetes: "a b" is not an API group`:            {Config: config, Groups: []string{"a b"}},
		`kubernetes: API group "example.org" is given twice`: {Config: config,
			Groups: []string{"example.org", "example.org"}},
	} {
		_, err := NewModelServers(o)
		assert.EqualError(t, err, want)
	}
	_, err := NewModelServers(nil)
	assert.Error(t, err)
	config.CAFile = "no/such/file"
	_, err = NewModelServers(&ModelServerOptions{Config: config})
	assert.Error(t, err)
	assert.Equal(t, groups(), ModelServerGroups(), "what is watched is what is read")
}
