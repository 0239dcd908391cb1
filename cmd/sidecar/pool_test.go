// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
	"github.com/pdkit/pdkit/enginesim"
)

// poolCRD defines InferencePools in one of their groups, with the parts that the sidecar reads.
const poolCRD = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: inferencepools.%[1]s
  annotations:
    api-approved.kubernetes.io: "https://github.com/kubernetes-sigs/gateway-api-inference-extension/pull/1173"
spec:
  group: %[1]s
  names: {kind: InferencePool, listKind: InferencePoolList, plural: inferencepools, singular: inferencepool}
  scope: Namespaced
  versions:
    - name: %[2]s
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

// poolRights are the rights that KServe gives a routing sidecar (kserve, pkg/controller/v1alpha2/llmisvc/workload.go),
// without get.
const poolRights = `apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: sidecar}
rules:
  - {apiGroups: [""], resources: [pods], verbs: [list, watch]}
  - {apiGroups: [%[1]s], resources: [inferencepools], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: sidecar}
subjects: [{kind: ServiceAccount, name: sidecar, namespace: %[2]s}]
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: sidecar}
`

// place is a namespace of a real API server, with an account that has the rights that KServe gives a sidecar.
type place struct {
	*kubetest.Cluster
	t          *testing.T
	name       string
	group      string
	kubeconfig string
}

func newPlace(t *testing.T, group, version string) *place {
	t.Helper()
	c := kubetest.Shared(t)
	n := &place{Cluster: c, t: t, name: c.Namespace(t), group: group}
	c.Apply(t, c.Admin(), fmt.Appendf(nil, poolCRD, group, version), "")
	account := c.ServiceAccount(t, n.name, "sidecar")
	n.apply(fmt.Sprintf(poolRights, group, n.name))
	n.kubeconfig = c.Kubeconfig(t, account)
	return n
}

func (n *place) apply(yaml string) {
	n.t.Helper()
	n.Apply(n.t, n.Admin(), []byte(yaml), n.name)
}

func (n *place) pool(spec string) { n.t.Helper(); n.named("pool", spec) }

func (n *place) named(name, spec string) {
	n.t.Helper()
	version := map[string]string{poolGroup: "v1", oldPoolGroup: "v1alpha2"}[n.group]
	n.apply(
		fmt.Sprintf("apiVersion: %s/%s\nkind: InferencePool\nmetadata: {name: %s}\nspec: %s\n", n.group, version, name,
			spec),
	)
}

func (n *place) pod(name, ip string, labels map[string]string) {
	n.t.Helper()
	n.Pod(n.t, n.name, name, labels, nil)
	n.SetPod(n.t, n.name, name, ip, false) // the scheduler decides whether it is ready
}

// prefiller starts a prefill engine at its own address, as a pod has one, and a decode engine for it.
func prefiller(t *testing.T, ip string, port int) (p, d *enginesim.Engine) {
	t.Helper()
	return twoEngines(t, enginesim.Config{Listen: net.JoinHostPort(ip, strconv.Itoa(port))}, enginesim.Config{})
}

// This is KServe's unchanged manifest, with the variables and rights that its controller adds. A request may name the
// pods of the pool at its port, and no others. The list follows the pool and its pods.
func TestAnInferencePoolSaysWhomARequestMayName(t *testing.T) {
	n := newPlace(t, oldPoolGroup, "v1alpha2")
	port := ports(t, 1)
	_, d := prefiller(t, "127.8.0.1", port)
	other := lone(t, enginesim.Config{Listen: net.JoinHostPort("127.8.0.2", strconv.Itoa(port)), Connector: "nixl",
		KVRole: "kv_producer"})
	env := map[string]string{"INFERENCE_POOL_NAMESPACE": n.name, "INFERENCE_POOL_NAME": "pool",
		"KUBECONFIG": n.kubeconfig}
	x := start(t, env, append(manifests["KServe without TLS"].args, "--port=0", "--vllm-port="+portOf(t, d.URL()))...)
	send := func(ip string, port int) int {
		return statusOf(complete(t, x.addr, 0, false, header, net.JoinHostPort(ip, strconv.Itoa(port))))
	}
	becomes := func(ip string, status int, why string) {
		t.Helper()
		require.Eventually(t, func() bool { return send(ip, port) == status }, 30*time.Second, 50*time.Millisecond,
			"%s\n%s", why, x.log)
	}
	n.named("a-pool", fmt.Sprintf("{selector: {app: llm}, targetPortNumber: %d}", port+1)) // another pool's port
	becomes("127.8.0.1", http.StatusForbidden, "there is no pool")
	noPool := func() int { return strings.Count(x.log.String(), "there is no such InferencePool") }
	require.Eventually(t, func() bool { return noPool() > 0 }, 30*time.Second, 20*time.Millisecond, "%s", x.log)

	n.pool(fmt.Sprintf("{selector: {app: llm}, targetPortNumber: %d}", port))
	n.pod("prefill", "127.8.0.1", map[string]string{"app": "llm"})
	n.pod("stranger", "127.8.0.2", map[string]string{"app": "web"})
	becomes("127.8.0.1", http.StatusOK, "a pod of the pool")
	assert.Equal(t, 1, noPool(), "%s", x.log)
	assert.Equal(t, http.StatusForbidden, send("127.8.0.2", port), "a pod of another app")
	assert.Equal(t, http.StatusForbidden, send("127.8.0.1", port+1), "another port of the pod")
	assert.Empty(t, other.Requests())

	n.pool(fmt.Sprintf("{selector: {app: web}, targetPortNumber: %d}", port))
	becomes("127.8.0.1", http.StatusForbidden, "the pool chooses others now")
	becomes("127.8.0.2", http.StatusOK, "those")
	n.pod("late", "127.8.0.3", map[string]string{"app": "llm"})
	assert.Never(t, func() bool {
		return send("127.8.0.2", port) != http.StatusOK || send("127.8.0.3", port) != http.StatusForbidden
	},
		500*time.Millisecond, 20*time.Millisecond, "what happens to those that it chose before is nothing to it")
	n.SetLabels(t, n.name, "prefill", map[string]string{"app": "web"})
	becomes("127.8.0.1", http.StatusOK, "a pod that came to the pool")
	n.DeletePod(t, n.name, "prefill", 0)
	becomes("127.8.0.1", http.StatusForbidden, "a pod that is gone")

	status, h, _ := complete(t, x.addr, 0, false)
	assert.Equal(t, http.StatusOK, status, "who names nobody is served alone all the time")
	assert.Equal(t, "aggregated", h.Get("X-Pd-Mode"))
}

// The pool's current API group has several ports, those of data-parallel ranks.
func TestAllPortsOfAnInferencePoolMayBeNamed(t *testing.T) {
	n := newPlace(t, poolGroup, "v1")
	port := ports(t, 2)
	_, d := prefiller(t, "127.8.1.1", port)
	n.pool(fmt.Sprintf("{selector: {matchLabels: {app: llm}}, targetPorts: [{number: %d}, {number: %d}]}", port, port+
		1))
	n.pod("prefill", "127.8.1.1", map[string]string{"app": "llm"})
	x := before(t, d.URL(), map[string]string{"KUBECONFIG": n.kubeconfig}, "--inference-pool="+n.name+"/pool")
	send := func(port int) int {
		return statusOf(complete(t, x.addr, 0, false, header, "127.8.1.1:"+strconv.Itoa(port)))
	}
	require.Eventually(t, func() bool { return send(port) == http.StatusOK }, 30*time.Second, 50*time.Millisecond, "%s",
		x.log)
	assert.Equal(t, http.StatusBadGateway, send(port+1), "it may be named, and nobody listens")
	assert.Equal(t, http.StatusForbidden, send(port+2))

	n.pool("{selector: {matchLabels: {app: llm}}, targetPorts: []}")
	require.Eventually(t, func() bool { return strings.Contains(x.log.String(), "has no selector or no target port") },
		30*time.Second, 50*time.Millisecond)
	assert.Equal(t, http.StatusOK, send(port), "a pool that makes no sense leaves the last list")
}

// A pool has no roles: each of its pods may be asked to encode, and no other.
func TestEncodeEnginesAreOfThePoolToo(t *testing.T) {
	n := newPlace(t, poolGroup, "v1")
	port := ports(t, 1)
	at := func(ip string) string { return net.JoinHostPort(ip, strconv.Itoa(port)) }
	p, d := twoEngines(t, enginesim.Config{Listen: at("127.8.3.1"),
		Extra: map[string]string{"ec_role": "ec_consumer"}}, enginesim.Config{})
	var encode [2]*enginesim.Engine
	for i := range encode {
		encode[i] = lone(t, enginesim.Config{Listen: at("127.8.3." + strconv.Itoa(i+2)),
			Extra: map[string]string{"ec_role": "ec_producer"}})
	}
	n.pool(fmt.Sprintf("{selector: {matchLabels: {app: llm}}, targetPorts: [{number: %d}]}", port))
	n.pod("prefill", "127.8.3.1", map[string]string{"app": "llm"})
	n.pod("encode", "127.8.3.2", map[string]string{"app": "llm"})
	n.pod("stranger", "127.8.3.3", map[string]string{"app": "web"})
	x := before(t, d.URL(), map[string]string{"KUBECONFIG": n.kubeconfig}, "--ec-connector=ec-nixl",
		"--inference-pool="+n.name+"/pool")
	require.Eventually(t, func() bool {
		return statusOf(ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/chat/completions",
			chatWith(0, false), header, at("127.8.3.1"),
			encoders, at("127.8.3.3")+","+at("127.8.3.2"))) == http.StatusOK
	}, 30*time.Second, 50*time.Millisecond, "%s", x.log)
	assert.EqualValues(t, 2, encode[0].Stats().MediaEncoded)
	assert.EqualValues(t, 2, p.Stats().MediaLoaded)
	assert.Empty(t, encode[1].Requests())
}

// Without the rights no request may name an engine, and the log says which right is missing.
func TestAPoolThatMayNotBeReadIsAnEmptyList(t *testing.T) {
	n := newPlace(t, poolGroup, "v1")
	stranger := n.Kubeconfig(t, n.ServiceAccount(t, n.name, "stranger"))
	_, d := prefiller(t, "127.8.2.1", ports(t, 1))
	x := before(t, d.URL(), map[string]string{"KUBECONFIG": stranger}, "--inference-pool="+n.name+"/pool")
	require.Eventually(t, func() bool {
		return strings.Contains(x.log.String(), "inferencepools cannot be listed: Forbidden")
	}, 30*time.Second, 50*time.Millisecond, "%s", x.log)
	assert.Equal(t, http.StatusServiceUnavailable,
		statusOf(complete(t, x.addr, 0, false, header, "127.8.2.1:1")), "until there is a list")
}

func TestAFaultOfThePoolIsToldOnceUntilItChanges(t *testing.T) {
	var said []string
	p := &pool{tell: func(err error) { said = append(said, err.Error()) }, told: map[string]string{}}
	for _, text := range []string{"a", "a", "b", "", "", "b"} {
		var err error
		if text != "" {
			err = errors.New(text)
		}
		p.fault("list", err)
		p.fault("watch", errors.New("c"))
	}
	assert.Equal(t, []string{"a", "c", "b", "b"}, said)
}

// If a list is given by hand, only the list counts, and the sidecar does not ask an API server.
func TestAListByHandReplacesThePool(t *testing.T) {
	_, _, x := pair(t, enginesim.Config{}, enginesim.Config{},
		map[string]string{"INFERENCE_POOL_NAMESPACE": "a", "INFERENCE_POOL_NAME": "b", "KUBECONFIG": "/nowhere"},
		"--enable-ssrf-protection=true")
	assert.NotContains(t, x.log.String(), "WARN")
}
