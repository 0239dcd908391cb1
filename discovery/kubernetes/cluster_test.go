// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
)

// These tests talk to a real API server.

func grouped(c *kubetest.Cluster, namespace string) Options {
	return Options{Config: c.Admin(), Namespace: namespace,
		Selector: Selector{MatchLabels: map[string]string{"app": "llm"}, PDGroup: byRole}}
}

func prefillLabels() map[string]string {
	return map[string]string{"app": "llm", "role": "prefill", "group": "a"}
}

func TestEveryEventOfAPod(t *testing.T) {
	c := kubetest.Shared(t)
	ns := c.Namespace(t)
	s := look(t, grouped(c, ns), 0)
	s.list(t, "")
	line := func(rest string) string { return ns + "/p-0 http://127.0.0.11:8100 " + rest + " node=node" }

	c.Pod(t, ns, "p-0", prefillLabels(), nil, corev1.ContainerPort{Name: "http", ContainerPort: 8100})
	c.SetPod(t, ns, "p-0", "127.0.0.11", false)
	s.list(t, line("prefill not-ready group=a"))
	c.SetPod(t, ns, "p-0", "127.0.0.11", true)
	s.list(t, line("prefill ready group=a"))
	c.SetLabels(t, ns, "p-0", map[string]string{"role": "decode"})
	s.list(t, line("decode ready group=a"))
	c.SetLabels(t, ns, "p-0", map[string]string{"role": "prefill", "group": "b"})
	s.list(t, line("prefill ready group=b"))
	c.SetLabels(t, ns, "p-0", map[string]string{"app": "web"})
	s.list(t, "")
	c.SetLabels(t, ns, "p-0", map[string]string{"app": "llm"})
	c.SetAnnotations(t, ns, "p-0", map[string]string{"pdkit.dev/zmqAddress": "$(POD_IP):21001"})
	s.list(t, line("prefill ready group=b")+" zmqAddress:127.0.0.11:21001")
	c.SetAnnotations(t, ns, "p-0", map[string]string{"pdkit.dev/zmqAddress": ""})
	c.SetPod(t, ns, "p-0", "127.0.0.11", false)
	s.list(t, line("prefill not-ready group=b"))
	c.SetPod(t, ns, "p-0", "127.0.0.11", true)
	s.list(t, line("prefill ready group=b"))
	c.DeletePod(t, ns, "p-0", 30)
	s.list(t, line("prefill draining group=b"))
	c.DeletePod(t, ns, "p-0", 0)
	s.list(t, "")

	c.Pod(t, ns, "p-0", prefillLabels(), nil, corev1.ContainerPort{Name: "http", ContainerPort: 8100})
	c.SetPod(t, ns, "p-0", "127.0.0.12", true)
	s.list(t, ns+"/p-0 http://127.0.0.12:8100 prefill ready group=a node=node")
	assert.Empty(t, s.told())
}

func TestZonesOfPodsAndOfTheirNodes(t *testing.T) {
	c := kubetest.Shared(t)
	ns := c.Namespace(t)
	c.Node(t, ns+"-1", "z1") // the API server copies this zone to pods
	c.Node(t, ns+"-2", "")   // and does not, where the node has none yet
	for i := range 2 {
		name := fmt.Sprintf("p-%d", i+1)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: prefillLabels()}}
		pod.Spec = corev1.PodSpec{NodeName: fmt.Sprintf("%s-%d", ns, i+1),
			Containers: []corev1.Container{{Name: "engine", Image: "engine"}}}
		c.CreatePod(t, pod)
		c.SetPod(t, ns, name, "127.0.0.11", true)
	}
	o := grouped(c, ns)
	o.Nodes = true
	s := look(t, o, 0)
	line := "%[1]s/p-1 http://127.0.0.11:8000 prefill ready group=a zone=z1 node=%[1]s-1\n%[1]s/p-2 " +
		"http://127.0.0.11:8000 prefill ready group=a%[2]s node=%[1]s-2"
	s.list(t, fmt.Sprintf(line, ns, ""))
	patch := []byte(`{"metadata": {"labels": {"` + zoneLabel + `": "z2"}}}`)
	_, err := c.Client().CoreV1().Nodes().Patch(t.Context(), ns+"-2", types.MergePatchType, patch,
		metav1.PatchOptions{})
	require.NoError(t, err)
	s.list(t, fmt.Sprintf(line, ns, " zone=z2"))
}

func TestSourceKeepsTheRulesWithARealServer(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t)
	var ns string
	var under noted
	made := 0
	add := func() error {
		made++
		name := fmt.Sprintf("p-%d", made)
		c.Pod(t, ns, name, prefillLabels(), nil)
		c.SetPod(t, ns, name, "127.0.0.11", true)
		return nil
	}
	discoverytest.Run(t, discoverytest.Harness{
		New: func() discovery.Source {
			ns = c.Namespace(t)
			_, _ = add(), add()
			o := grouped(c, ns)
			source, err := New(&o)
			require.NoError(t, err)
			under = note(source)
			return under
		},
		Change: add,
		Break:  func() error { c.KillAPIServer(); return nil },
		Repair: func() error { c.StartAPIServer(t); return nil },
		Remove: func() (string, error) {
			name := fmt.Sprintf("p-%d", made)
			c.DeletePod(t, ns, name, 30)
			under.drains(t, ns+"/"+name) // else the one event may catch up with the other, and it is gone at once
			c.DeletePod(t, ns, name, 0)
			return ns + "/" + name, nil
		},
		Timeout: time.Minute,
		Settle:  2 * time.Second, // with the server down
	})
}

// quiet returns a function that says what client-go has logged meanwhile.
func quiet(t *testing.T) func() string {
	t.Helper()
	var mu sync.Mutex
	var log bytes.Buffer
	state := klog.CaptureState()
	t.Cleanup(state.Restore)
	klog.LogToStderr(false)
	klog.SetOutput(writer(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return log.Write(p)
	}))
	return func() string {
		klog.Flush()
		mu.Lock()
		defer mu.Unlock()
		return log.String()
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// What the API server does is told in pdkit's words, and not in client-go's. The two run beside each other, since each
// waits for a server of its own, and nothing else may, since client-go has one log.
func TestOutagesOfTheAPIServer(t *testing.T) {
	logged := quiet(t)
	t.Run("beside each other", func(t *testing.T) {
		t.Run("a long one", aLongOutage)
		t.Run("a restart and a lost history are not told", aRestartAndALostHistory)
	})
	assert.Empty(t, logged())
}

func aLongOutage(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t)
	ns := c.Namespace(t)
	var ready []discoveryv1.Endpoint
	for i := range 4 {
		ready = append(ready, of("", fmt.Sprintf("10.0.0.%d", i), isReady))
	}
	for i := range 3 {
		name := fmt.Sprintf("p-%d", i)
		c.Pod(t, ns, name, prefillLabels(), nil)
		c.SetPod(t, ns, name, ready[i].Addresses[0], true)
	}
	// The controller that writes slices has outages of its own, and longer pauses.
	parts := c.Client().DiscoveryV1().EndpointSlices(ns)
	_, err := parts.Create(t.Context(), endpointSlice("s1", ready[:3]...), metav1.CreateOptions{})
	require.NoError(t, err)
	pods := look(t, grouped(c, ns), patience)
	byService := look(
		t, Options{Config: c.Admin(), Namespace: ns,
			Services: []Service{{Name: "prefill", Role: discovery.RolePrefill}}}, patience,
	)
	podLine := func(i int, phase string) string {
		return fmt.Sprintf("%s/p-%d http://10.0.0.%d:8000 prefill %s group=a node=node", ns, i, i, phase)
	}
	sliceLine := func(i int, phase string) string {
		return fmt.Sprintf("%s/prefill/10.0.0.%d:8100 http://10.0.0.%d:8100 prefill %s", ns, i, i, phase)
	}
	pods.list(t, podLine(0, "ready"), podLine(1, "ready"), podLine(2, "ready"))
	byService.list(t, sliceLine(0, "ready"), sliceLine(1, "ready"), sliceLine(2, "ready"))

	c.KillAPIServer()
	const fault = "kubernetes: the API server does not answer: connection refused (the last list stays)"
	pods.fault(t, fault)
	byService.fault(t, fault)
	time.Sleep(10 * time.Second) // with what must not happen
	c.StartAPIServer(t)
	c.DeletePod(t, ns, "p-0", 0)
	c.DeletePod(t, ns, "p-1", 30)
	c.Pod(t, ns, "p-3", prefillLabels(), nil)
	c.SetPod(t, ns, "p-3", "10.0.0.3", true)
	_, err = parts.Update(t.Context(), endpointSlice("s1", of("", "10.0.0.1", isTerminating), ready[2], ready[3]),
		metav1.UpdateOptions{})
	require.NoError(t, err)

	pods.list(t, podLine(1, "draining"), podLine(2, "ready"), podLine(3, "ready"))
	byService.list(t, sliceLine(1, "draining"), sliceLine(2, "ready"), sliceLine(3, "ready"))
	for _, s := range []*seen{pods, byService} {
		assert.Equal(t, []string{fault}, s.told())
		for _, snap := range s.published() {
			assert.GreaterOrEqual(t, len(snap.Endpoints), 2, "never emptied, nor in parts") // some come after others
		}
	}
}

func aRestartAndALostHistory(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t)
	ns := c.Namespace(t)
	c.Pod(t, ns, "p-0", prefillLabels(), nil)
	c.SetPod(t, ns, "p-0", "127.0.0.11", true)
	s := look(t, grouped(c, ns), time.Minute) // slow machines have slow restarts
	line := ns + "/p-0 http://127.0.0.11:8000 prefill %s group=a node=node"
	s.list(t, fmt.Sprintf(line, "ready"))
	c.KillAPIServer()
	c.StartAPIServer(t)
	c.SetPod(t, ns, "p-0", "127.0.0.11", false)
	s.list(t, fmt.Sprintf(line, "not-ready"))

	other := c.Namespace(t) // whose events make the version that the source knows an old one
	for i := range 20 {
		c.Pod(t, other, fmt.Sprintf("x-%d", i), nil, nil)
	}
	c.Compact(t)
	c.KillAPIServer()
	c.StartAPIServer(t)
	c.SetPod(t, ns, "p-0", "127.0.0.11", true)
	s.list(t, fmt.Sprintf(line, "ready"))
	assert.Empty(t, s.told())
	assert.Len(t, s.published(), 3)
}

// shortWatches has the server end each watch after some seconds. A reflector asks for minutes.
type shortWatches struct {
	http.RoundTripper
	mu      sync.Mutex
	watches int
}

func (s *shortWatches) RoundTrip(r *http.Request) (*http.Response, error) {
	q := r.URL.Query()
	if q.Get("watch") != "" {
		s.mu.Lock()
		s.watches++
		s.mu.Unlock()
		r = r.Clone(r.Context())
		q.Set("timeoutSeconds", "3")
		r.URL.RawQuery = q.Encode()
	}
	return s.RoundTripper.RoundTrip(r)
}

func (s *shortWatches) WrappedRoundTripper() http.RoundTripper { return s.RoundTripper }

func (s *shortWatches) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.watches
}

func TestWatchesThatTheServerEndsCostNoEvent(t *testing.T) {
	t.Parallel()
	c := kubetest.Shared(t)
	ns := c.Namespace(t)
	c.Pod(t, ns, "p-0", prefillLabels(), nil)
	o := grouped(c, ns)
	short := &shortWatches{}
	o.Config.Wrap(func(rt http.RoundTripper) http.RoundTripper { short.RoundTripper = rt; return short })
	s := look(t, o, 0)
	ready := false
	for i := 0; short.count() < 5; i++ {
		ready = !ready
		c.SetPod(t, ns, "p-0", "127.0.0.11", ready)
		phase := map[bool]string{true: "ready", false: "not-ready"}[ready]
		s.list(t, ns+"/p-0 http://127.0.0.11:8000 prefill "+phase+" group=a node=node")
	}
	assert.Empty(t, s.told())
}

func service(t *testing.T, c *kubetest.Cluster, ns, role string) {
	t.Helper()
	c.Apply(t, c.Admin(), fmt.Appendf(nil, "apiVersion: v1\nkind: Service\nmetadata: {name: %[1]s}\n"+
		"spec: {clusterIP: None, selector: {role: %[1]s}, ports: [{name: api, port: 8000}, {name: metrics, "+
		"port: 9090}]}", role), ns)
}

func TestSlicesOfTheRealController(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t, kubetest.WithControllers())
	ns := c.Namespace(t)
	service(t, c, ns, "prefill")
	o := Options{Config: c.Admin(), Namespace: ns, Port: "api",
		Services: []Service{{Name: "prefill", Role: discovery.RolePrefill}}}
	alone := look(t, o, 0)
	o.Services, o.Selector = []Service{{Name: "prefill"}}, Selector{PDGroup: byRole}
	joined := look(t, o, 0)
	lists := func(phase string) {
		t.Helper()
		alone.list(t, ns+"/p-0 http://10.0.0.1:8000 prefill "+phase+" node=node")
		joined.list(t, ns+"/p-0 http://10.0.0.1:8000 prefill "+phase+" group=a node=node x:1")
	}
	alone.list(t, "")
	joined.list(t, "")
	c.Pod(t, ns, "p-0", prefillLabels(), map[string]string{"pdkit.dev/x": "1"})
	c.SetPod(t, ns, "p-0", "10.0.0.1", false)
	lists("not-ready")
	c.SetPod(t, ns, "p-0", "10.0.0.1", true)
	lists("ready")
	c.DeletePod(t, ns, "p-0", 30)
	lists("draining")
	c.DeletePod(t, ns, "p-0", 0)
	alone.list(t, "")
	joined.list(t, "")

	const many = 150 // more than a slice holds
	for i := range many {
		name := fmt.Sprintf("q-%03d", i)
		c.Pod(t, ns, name, prefillLabels(), nil)
		c.SetPod(t, ns, name, fmt.Sprintf("10.0.1.%d", i), true)
	}
	for _, s := range []*seen{alone, joined} {
		s.until(t, func() bool {
			lists := s.published()
			last := lists[len(lists)-1].Endpoints
			return len(last) == many &&
				!slices.ContainsFunc(last, func(e discovery.Endpoint) bool { return e.Phase != discovery.PhaseReady })
		}, "all pods")
	}
	assert.Empty(t, alone.told())
	assert.Empty(t, joined.told())
}

func TestTheTokenOfAServiceAccountIsEnough(t *testing.T) {
	c := kubetest.Shared(t)
	ns := c.Namespace(t)
	config, err := Config(c.Kubeconfig(t, c.ServiceAccount(t, ns, "gateway")))
	require.NoError(t, err)
	o := grouped(c, ns)
	o.Config = config
	s := look(t, o, 0)
	s.fault(t, denied("list pods", ns, "there is no list yet"))
	c.Apply(t, c.Admin(), []byte(`
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: gateway}
rules: [{apiGroups: [""], resources: [pods], verbs: [list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: gateway}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: gateway}
subjects: [{kind: ServiceAccount, name: gateway}]
`), ns)
	s.list(t, "")
	assert.Len(t, s.told(), 1)
}

// A Watch must end with its context even while the server does not answer.
func TestWatchEndsWhileTheServerIsDown(t *testing.T) {
	t.Parallel()
	o := grouped(kubetest.Shared(t), "default")
	o.Config.Host = "https://127.0.0.1:1"
	source, err := New(&o)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second) // in the second or third pause
	defer cancel()
	require.NoError(t, source.Watch(ctx, func(discovery.Snapshot) { t.Error("published") }))
	end, _ := ctx.Deadline()
	assert.Less(t, time.Since(end), 2*time.Second)
}
