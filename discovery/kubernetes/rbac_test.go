// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	k8sschema "k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	clientset "k8s.io/client-go/kubernetes"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
)

const (
	account = "pdkit-gateway" // the account, and the role of manifests/rbac.yaml
	nodes   = "pdkit-gateway-nodes"
)

// grant applies manifests/rbac.yaml in a namespace, and returns what the gateway's account has.
func grant(t *testing.T, c *kubetest.Cluster, namespace string) *rest.Config {
	t.Helper()
	manifest, err := os.ReadFile("manifests/rbac.yaml")
	require.NoError(t, err)
	c.Apply(t, c.Admin(), manifest, namespace)
	return c.Token(t, namespace, account)
}

// grantNodes applies manifests/rbac-nodes.yaml for the account of a namespace.
func grantNodes(t *testing.T, c *kubetest.Cluster, namespace string) {
	t.Helper()
	manifest, err := os.ReadFile("manifests/rbac-nodes.yaml")
	require.NoError(t, err)
	require.Equal(t, 1, bytes.Count(manifest, []byte("namespace: default\n")), "what a reader has to edit")
	c.Apply(t, c.Admin(), bytes.ReplaceAll(manifest, []byte("namespace: default\n"), []byte("namespace: "+namespace+
		"\n")), "")
	t.Cleanup(func() {
		ctx := context.Background()
		require.NoError(t, c.Client().RbacV1().ClusterRoleBindings().Delete(ctx, nodes, metav1.DeleteOptions{}))
		require.NoError(t, c.Client().RbacV1().ClusterRoles().Delete(ctx, nodes, metav1.DeleteOptions{}))
	})
}

// revoke takes a resource out of the role in a namespace.
func revoke(t *testing.T, c *kubetest.Cluster, namespace, resource string) {
	t.Helper()
	roles := c.Client().RbacV1().Roles(namespace)
	role, err := roles.Get(t.Context(), account, metav1.GetOptions{})
	require.NoError(t, err)
	rules := len(role.Rules)
	role.Rules = slices.DeleteFunc(role.Rules, func(r rbacv1.PolicyRule) bool {
		return slices.Equal(r.Resources, []string{resource})
	})
	require.Len(t, role.Rules, rules-1)
	_, err = roles.Update(t.Context(), role, metav1.UpdateOptions{})
	require.NoError(t, err)
}

// asker asks the API server what config may do.
func asker(t *testing.T, config *rest.Config) authorizationclient.SelfSubjectAccessReviewInterface {
	t.Helper()
	client, err := clientset.NewForConfig(config)
	require.NoError(t, err)
	return client.AuthorizationV1().SelfSubjectAccessReviews()
}

// may asks for one right. The namespace "" is all of them.
func may(t *testing.T, ask authorizationclient.SelfSubjectAccessReviewInterface, namespace string, of resource,
	verb string) bool {
	t.Helper()
	name, sub, _ := strings.Cut(of.name, "/")
	review, err := ask.Create(t.Context(), &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: namespace, Group: of.group, Resource: name, Subresource: sub, Verb: verb,
		}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	return review.Status.Allowed
}

// awaitRight waits until a right to list is given, or taken: the server learns of its roles by events, too.
func awaitRight(t *testing.T, config *rest.Config, namespace string, of resource, given bool) {
	t.Helper()
	ask := asker(t, config)
	require.Eventually(t, func() bool { return may(t, ask, namespace, of, "list") == given }, time.Minute,
		10*time.Millisecond)
}

type resource struct{ group, name string }

var (
	podResource   = resource{"", "pods"}
	sliceResource = resource{"discovery.k8s.io", "endpointslices"}
	nodeResource  = resource{"", "nodes"}
)

// askable are the resources and verbs of the table: those of discovery, what belongs to them, and what a thief would
// like.
var (
	askable = []resource{
		podResource, sliceResource,
		{"networking.matrixinfer.ai", "modelservers"}, {"networking.serving.volcano.sh", "modelservers"},
		nodeResource,
		{"", "pods/log"}, {"", "pods/exec"}, {"", "pods/attach"}, {"", "pods/portforward"}, {"", "pods/proxy"},
		{"", "pods/status"},
		{"", "pods/eviction"}, {"", "pods/ephemeralcontainers"},
		{"networking.matrixinfer.ai", "modelservers/status"}, {"networking.serving.volcano.sh", "modelservers/status"},
		{"", "nodes/proxy"}, {"", "nodes/status"},
		{"", "services"}, {"", "services/proxy"}, {"", "endpoints"}, {"", "secrets"}, {"", "configmaps"},
		{"", "events"},
		{"", "serviceaccounts"}, {"", "serviceaccounts/token"}, {"", "namespaces"}, {"apps", "deployments"},
		{"coordination.k8s.io", "leases"}, {"networking.matrixinfer.ai", "*"}, {"", "*"}, {"*", "*"},
		{"rbac.authorization.k8s.io", "roles"}, {"rbac.authorization.k8s.io", "rolebindings"},
		{"rbac.authorization.k8s.io", "clusterroles"}, {"rbac.authorization.k8s.io", "clusterrolebindings"},
		{"apiextensions.k8s.io", "customresourcedefinitions"},
	}
	verbs = []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "impersonate",
		"bind", "escalate", "*"}
)

// rights asks for everything, and writes it as a table: what is allowed where, of all verbs.
func rights(t *testing.T, config *rest.Config, own, other string) (allowed map[string]string) {
	t.Helper()
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "RESOURCE\tITS NAMESPACE\tANOTHER\tALL")
	allowed = map[string]string{}
	ask := asker(t, config)
	for _, r := range askable {
		fmt.Fprint(w, strings.TrimSuffix(r.name+"."+r.group, "."))
		for _, place := range []struct{ name, namespace string }{{"own", own}, {"another", other}, {"all", ""}} {
			yes := slices.DeleteFunc(slices.Clone(verbs), func(verb string) bool {
				return !may(t, ask, place.namespace, r, verb)
			})
			fmt.Fprint(w, "\t", cmp.Or(strings.Join(yes, ","), "-"))
			if len(yes) > 0 {
				allowed[place.name+" "+strings.TrimSuffix(r.name+"."+r.group, ".")] = strings.Join(yes, ",")
			}
		}
		fmt.Fprintln(w)
	}
	require.NoError(t, w.Flush())
	t.Logf("of the verbs %s:\n%s", strings.Join(verbs, ", "), &text)
	return allowed
}

// inNamespace is all that rbac.yaml is to give.
var inNamespace = map[string]string{
	"own pods":                                       "list,watch",
	"own endpointslices.discovery.k8s.io":            "list,watch",
	"own modelservers.networking.matrixinfer.ai":     "list,watch",
	"own modelservers.networking.serving.volcano.sh": "list,watch",
}

func TestAccountMayListAndWatchWhatDiscoveryNeedsAndNothingElse(t *testing.T) {
	c := kubetest.Shared(t)
	own, other := c.Namespace(t), c.Namespace(t)
	config := grant(t, c, own)
	awaitRight(t, config, own, podResource, true)
	assert.Equal(t, inNamespace, rights(t, config, own, other))

	t.Run("the whole of its rules", func(t *testing.T) {
		client, err := clientset.NewForConfig(config)
		require.NoError(t, err)
		review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(),
			&authorizationv1.SelfSubjectRulesReview{
				Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: own},
			}, metav1.CreateOptions{})
		require.NoError(t, err)
		require.False(t, review.Status.Incomplete)
		var rules []string
		for _, r := range review.Status.ResourceRules {
			rules = append(rules, fmt.Sprint(r.Verbs, r.APIGroups, r.Resources))
		}
		assert.ElementsMatch(t, []string{
			"[list watch] [] [pods]", "[list watch] [discovery.k8s.io] [endpointslices]",
			"[list watch] [networking.matrixinfer.ai networking.serving.volcano.sh] [modelservers]",
			// What Kubernetes gives to everybody who is authenticated.
			"[create] [authentication.k8s.io] [selfsubjectreviews]",
			"[create] [authorization.k8s.io] [selfsubjectaccessreviews selfsubjectrulesreviews]",
		}, rules)
	})

	t.Run("with nodes", func(t *testing.T) {
		grantNodes(t, c, own)
		awaitRight(t, config, "", nodeResource, true)
		want := maps.Clone(inNamespace)
		for _, place := range []string{"own", "another", "all"} { // nodes have no namespace
			want[place+" nodes"] = "list,watch"
		}
		assert.Equal(t, want, rights(t, config, own, other))
	})
}

// TestCallsOfTheAccount makes calls, where the table asks for rights.
func TestCallsOfTheAccount(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	own, other := c.Namespace(t), c.Namespace(t)
	for _, namespace := range []string{own, other} {
		c.Pod(t, namespace, "prefill-0", nil, nil)
		makeSlice(t, c, namespace)
		for _, group := range ModelServerGroups() {
			c.Apply(t, c.Admin(), []byte("apiVersion: "+group+
				"/v1alpha1\nkind: ModelServer\nmetadata: {name: prefill-0}\nspec: {model: m}"), namespace)
		}
	}
	config := grant(t, c, own)
	awaitRight(t, config, own, podResource, true)
	client, err := dynamic.NewForConfig(config)
	require.NoError(t, err)

	kinds := []k8sschema.GroupVersionResource{
		{Version: "v1", Resource: "pods"}, {Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"},
		{Group: "networking.matrixinfer.ai", Version: "v1alpha1", Resource: "modelservers"},
		{Group: "networking.serving.volcano.sh", Version: "v1alpha1", Resource: "modelservers"},
	}
	for _, kind := range kinds {
		t.Run(kind.GroupResource().String(), func(t *testing.T) {
			mine := client.Resource(kind).Namespace(own)
			list, err := mine.List(t.Context(), metav1.ListOptions{})
			require.NoError(t, err)
			require.Len(t, list.Items, 1)
			name := list.Items[0].GetName()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			events, err := mine.Watch(ctx, metav1.ListOptions{})
			require.NoError(t, err)
			defer events.Stop()
			event := <-events.ResultChan()
			require.Equal(t, watch.Added, event.Type)

			object := &list.Items[0]
			fresh := &unstructured.Unstructured{
				Object: map[string]any{"apiVersion": object.GetAPIVersion(), "kind": object.GetKind()},
			}
			fresh.SetName("fresh")
			_, err = mine.Get(t.Context(), name, metav1.GetOptions{})
			forbidden(t, "get", err)
			_, err = mine.Create(t.Context(), fresh, metav1.CreateOptions{})
			forbidden(t, "create", err)
			_, err = mine.Update(t.Context(), object, metav1.UpdateOptions{})
			forbidden(t, "update", err)
			_, err = mine.Patch(t.Context(), name, types.MergePatchType, []byte(`{"metadata":{"labels":{"a":"b"}}}`),
				metav1.PatchOptions{})
			forbidden(t, "patch", err)
			forbidden(t, "delete", mine.Delete(t.Context(), name, metav1.DeleteOptions{}))
			forbidden(
				t, "deletecollection", mine.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}),
			)

			_, err = client.Resource(kind).Namespace(other).List(t.Context(), metav1.ListOptions{})
			forbidden(t, "list", err)
			_, err = client.Resource(kind).Namespace(other).Watch(t.Context(), metav1.ListOptions{})
			forbidden(t, "watch", err)
			_, err = client.Resource(kind).List(t.Context(), metav1.ListOptions{})
			forbidden(t, "list", err)
		})
	}
	t.Run("others", func(t *testing.T) {
		client, err := clientset.NewForConfig(config)
		require.NoError(t, err)
		core := client.CoreV1()
		pod := func(r *rest.Request) *rest.Request { return r.Namespace(own).Resource("pods").Name("prefill-0") }
		forbidden(t, "get", pod(core.RESTClient().Get()).SubResource("log").Do(t.Context()).Error())
		forbidden(
			t, "create", pod(core.RESTClient().Post()).SubResource("exec").Param("command",
				"sh").Do(t.Context()).Error(),
		)
		_, err = core.Secrets(own).List(t.Context(), metav1.ListOptions{})
		forbidden(t, "list", err)
		_, err = core.Services(own).List(t.Context(), metav1.ListOptions{})
		forbidden(t, "list", err)
		_, err = core.Nodes().List(t.Context(), metav1.ListOptions{})
		forbidden(t, "list", err)
		_, err = core.ServiceAccounts(own).CreateToken(t.Context(), account, &authenticationv1.TokenRequest{},
			metav1.CreateOptions{})
		forbidden(t, "create", err)

		grantNodes(t, c, own)
		awaitRight(t, config, "", nodeResource, true)
		list, err := core.Nodes().List(t.Context(), metav1.ListOptions{})
		require.NoError(t, err)
		require.NotEmpty(t, list.Items)
		_, err = core.Nodes().Get(t.Context(), list.Items[0].Name, metav1.GetOptions{})
		forbidden(t, "get", err)
	})
}

// forbidden wants the refusal of a verb to the account, and not of anything else.
func forbidden(t *testing.T, verb string, err error) {
	t.Helper()
	assert.True(t, apierrors.IsForbidden(err), "%s: %v", verb, err)
	assert.ErrorContains(t, err, ":"+account+`" cannot `+verb+" resource")
}

// makeSlice makes the EndpointSlice of the service prefill, as its controller would.
func makeSlice(t *testing.T, c *kubetest.Cluster, namespace string) {
	t.Helper()
	e := of("", "10.77.0.11", isReady)
	e.Zone, e.TargetRef = new("zone-of-slice"), &corev1.ObjectReference{Kind: "Pod", Name: "prefill-0"}
	_, err := c.Client().DiscoveryV1().EndpointSlices(namespace).Create(t.Context(), endpointSlice("prefill-x", e),
		metav1.CreateOptions{})
	require.NoError(t, err)
}

func prefillPods() Selector {
	return Selector{PDGroup: &PDGroup{PrefillLabels: map[string]string{"role": "prefill"}}}
}

func TestSourceOfPodsWorksWithTheseRights(t *testing.T) {
	c := kubetest.Shared(t)
	namespace := c.Namespace(t)
	c.Pod(t, namespace, "prefill-0", map[string]string{"role": "prefill"}, nil)
	c.SetPod(t, namespace, "prefill-0", "127.0.0.11", true)

	o := Options{Config: c.ServiceAccount(t, namespace, account), Namespace: namespace, Selector: prefillPods()}
	seen := look(t, o, patience)
	seen.fault(t, denied("list pods", namespace, "there is no list yet"))

	grant(t, c, namespace)
	const line = "/prefill-0 http://%s:8000 prefill ready node=node"
	seen.list(t, namespace+fmt.Sprintf(line, "127.0.0.11"))
	c.SetPod(t, namespace, "prefill-0", "127.0.0.12", true)
	seen.list(t, namespace+fmt.Sprintf(line, "127.0.0.12"))

	seen = look(t, o, patience)
	seen.list(t, namespace+fmt.Sprintf(line, "127.0.0.12"))
	assert.Empty(t, seen.told())
}

func TestSourceOfServicesWithRolesNeedsNoRightToPods(t *testing.T) {
	c := kubetest.Shared(t)
	namespace := c.Namespace(t)
	makeSlice(t, c, namespace)
	config := grant(t, c, namespace)
	awaitRight(t, config, namespace, podResource, true)
	revoke(t, c, namespace, "pods")
	awaitRight(t, config, namespace, podResource, false)

	const line = "/prefill-0 http://10.77.0.11:8100 prefill ready zone=zone-of-slice"
	services := []Service{{Name: "prefill", Role: discovery.RolePrefill}}
	o := Options{Config: config, Namespace: namespace, Services: services}
	seen := look(t, o, patience)
	seen.list(t, namespace+line)
	assert.Empty(t, seen.told())

	// A service without a role asks the pods.
	o.Services, o.Selector = []Service{{Name: "prefill"}}, prefillPods()
	seen = look(t, o, patience)
	seen.fault(t, denied("list pods", namespace, "there is no list yet"))
	c.Pod(t, namespace, "prefill-0", map[string]string{"role": "prefill"}, nil)
	grant(t, c, namespace)
	seen.list(t, namespace+line+" node=node")

	revoke(t, c, namespace, "endpointslices")
	awaitRight(t, config, namespace, sliceResource, false)
	seen = look(t, Options{Config: config, Namespace: namespace, Services: services}, patience)
	seen.fault(t, denied("list endpointslices", namespace, "there is no list yet"))
}

func TestSourceWithNodesWorksWithTheOptionalRight(t *testing.T) {
	c := kubetest.Shared(t)
	namespace := c.Namespace(t)
	node := "node-" + namespace
	// The pod is older than its node, so that the API server has no zone to label it with: as before Kubernetes 1.35.
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "prefill-0",
		Labels: map[string]string{"role": "prefill"}}}
	pod.Spec = corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "engine", Image: "engine"}}}
	c.CreatePod(t, pod)
	c.SetPod(t, namespace, "prefill-0", "127.0.0.11", true)
	c.Node(t, node, "zone-of-node")
	config := grant(t, c, namespace)
	awaitRight(t, config, namespace, podResource, true)

	line := namespace + "/prefill-0 http://127.0.0.11:8000 prefill ready%s node=" + node
	options := Options{Config: config, Namespace: namespace, Selector: prefillPods(), Nodes: true}
	seen := look(t, options, patience)
	seen.fault(t, "kubernetes: not allowed to list nodes: see manifests/rbac.yaml (zones that only nodes know are "+
		"missing)")
	seen.list(t, fmt.Sprintf(line, ""))
	grantNodes(t, c, namespace)
	seen.list(t, fmt.Sprintf(line, " zone=zone-of-node"))

	awaitRight(t, config, "", nodeResource, true)
	seen = look(t, options, patience)
	seen.list(t, fmt.Sprintf(line, " zone=zone-of-node"))
	assert.Empty(t, seen.told())
}

func TestModelServersAreWatchedWithTheseRights(t *testing.T) {
	c := kubetest.Shared(t)
	install(t, c)
	namespace := c.Namespace(t)
	config := c.ServiceAccount(t, namespace, account)
	make := func(group, name string) {
		c.Apply(t, c.Admin(), []byte("apiVersion: "+group+"/v1alpha1\nkind: ModelServer\nmetadata: {name: "+name+
			"}\nspec: {model: m}"), namespace)
	}
	var want []string
	for _, group := range groups() {
		make(group, "m")
		want = append(want, denied("list modelservers."+group, namespace, "there is no list yet"))
	}
	w := watchModelServers(t, ModelServerOptions{Config: config, Namespace: namespace})
	assert.ElementsMatch(t, want, []string{w.fault(t).Error(), w.fault(t).Error()})
	grant(t, c, namespace)
	assert.Len(t, w.next(t), 2)
	make(groups()[1], "other")
	assert.Len(t, w.next(t), 3, "by a watch")
}
