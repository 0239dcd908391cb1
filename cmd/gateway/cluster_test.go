// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/discovery/kubernetes"
	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

const manifests = "../../discovery/kubernetes/manifests/"

// namespace is one of a real API server, with the CRDs and the rights that the project ships.
type namespace struct {
	*kubetest.Cluster
	t          *testing.T
	name       string
	kubeconfig string // of the gateway's own account, which may do nothing but what the manifest allows
}

func newNamespace(t *testing.T) *namespace {
	t.Helper()
	c := kubetest.Shared(t)
	n := &namespace{Cluster: c, t: t, name: c.Namespace(t)}
	crds, err := filepath.Glob(manifests + "crd-*.yaml")
	require.NoError(t, err)
	require.Len(t, crds, 2)
	for _, file := range append(crds, manifests+"rbac.yaml") {
		manifest, err := os.ReadFile(file)
		require.NoError(t, err)
		c.Apply(t, c.Admin(), manifest, n.name)
	}
	n.kubeconfig = c.Kubeconfig(t, c.Token(t, n.name, "pdkit-gateway"))
	return n
}

// serve starts a gateway of the namespace's ModelServers.
func (n *namespace) serve() *program {
	n.t.Helper()
	return start(n.t, gatewayYAML(fmt.Sprintf(", modelServers: {kubeconfig: %q, namespace: %s}", n.kubeconfig, n.name)))
}

func (n *namespace) objects() dynamic.ResourceInterface {
	client, err := dynamic.NewForConfig(n.Admin())
	require.NoError(n.t, err)
	return client.Resource(
		schema.GroupVersionResource{Group: "networking.matrixinfer.ai", Version: "v1alpha1", Resource: "modelservers"},
	).Namespace(n.name)
}

func (n *namespace) apply(yaml string) {
	n.t.Helper()
	n.Apply(n.t, n.Admin(), []byte(yaml), n.name)
}

func (n *namespace) modelServer(name, spec string) {
	n.t.Helper()
	n.apply("apiVersion: networking.matrixinfer.ai/v1alpha1\nkind: ModelServer\nmetadata: {name: " + name +
		"}\nspec: " + spec + "\n")
}

func (n *namespace) remove(name string) {
	n.t.Helper()
	require.NoError(n.t, n.objects().Delete(n.t.Context(), name, metav1.DeleteOptions{}))
}

// addresses are given to pods: those of loopback may be a pod's, and each has the port 8000 of its own. Another run of
// these tests beside this one has others.
var addresses atomic.Int64

func podIP() string {
	pid, i := os.Getpid(), addresses.Add(1)
	return fmt.Sprintf("127.%d.%d.%d", 16+pid>>8%192, pid%256, i%250+1)
}

// pod announces an engine as a ready pod.
func (n *namespace) pod(name, ip string, labels, annotations map[string]string) {
	n.t.Helper()
	n.Pod(n.t, n.name, name, labels, annotations)
	n.SetPod(n.t, n.name, name, ip, true)
}

// engines starts a pair of simulated engines for a protocol, at port 8000 of addresses of their own, as pods of a
// group. Settings are as in the protocol's own case.
func (n *namespace) engines(conn, model, name string, labels map[string]string) (p, d *enginesim.Engine) {
	n.t.Helper()
	c := protocol{connector: conn, prefill: enginesim.Config{Connector: "none"},
		decode: enginesim.Config{Connector: "none"}}
	for _, known := range protocols {
		if known.connector == conn && known.name == "" {
			c = known
			break
		}
	}
	if c.prepare != nil {
		c.prepare(n.t, &c)
	}
	ips := [2]string{podIP(), podIP()}
	for i, side := range []*enginesim.Config{&c.prefill, &c.decode} {
		side.Model, side.Listen = model, net.JoinHostPort(ips[i], "8000")
		if side.Connector == "" {
			side.Connector = conn
		}
	}
	p, d, err := enginesim.Pair(c.prefill, c.decode)
	require.NoError(n.t, err)
	n.t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	var of [2]attributes
	if c.attributes != nil {
		of[0], of[1] = c.attributes(p, d)
	}
	for i, role := range []string{"prefill", "decode"} {
		all := maps.Clone(labels)
		all["role"], all["group"] = role, name
		annotations := map[string]string{}
		for k, v := range of[i] {
			annotations["pdkit.dev/"+k] = v
		}
		n.pod(name+"-"+role, ips[i], all, annotations)
	}
	return p, d
}

func completionOf(model string) string {
	return fmt.Sprintf(`{"model":%q,"prompt":"%s","max_tokens":4}`, model,
		strings.Repeat("Where does the crane stand? ", 10))
}

// becomes waits until a request for the model is answered so.
func (n *namespace) becomes(g *program, model string, status int) {
	n.t.Helper()
	eventually(n.t, func() bool {
		got, _, _ := g.complete(completionOf(model))
		return got == status
	}, "%s", g.log)
}

// The ModelServers of the design documents, applied as they stand, are served over the pods that they choose.
func TestTheDocumentsModelServersAreServedFromACluster(t *testing.T) {
	files, err := filepath.Glob("testdata/documents/[12]-*.yaml")
	require.NoError(t, err)
	require.Len(t, files, 7)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			n := newNamespace(t)
			g := n.serve()
			object, err := os.ReadFile(file)
			require.NoError(t, err)
			n.apply(string(object))
			ms := n.only()
			n.becomes(g, ms.Model(), http.StatusServiceUnavailable) // known, and nobody is there

			_, d := n.engines(ms.Main.Name, ms.Model(), "group-a", ms.Spec.WorkloadSelector.MatchLabels)
			n.becomes(g, ms.Model(), http.StatusOK)
			status, h, body := g.complete(strings.Replace(completionOf(ms.Model()), "Where", "When", 1))
			assert.Equal(t, http.StatusOK, status, body)
			assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"))
			if ms.Main.Name != "http" {
				assert.NotZero(t, d.Stats().ExternalKVTransfer, "decode has taken KV over")
			}
			status, body = g.ready()
			assert.Equal(t, http.StatusOK, status, body)
			assert.Contains(t, body, n.name+"/"+ms.Name)
		})
	}
}

// only reads the namespace's only object, as the API server has it.
func (n *namespace) only() *modelserver.ModelServer {
	n.t.Helper()
	list, err := n.objects().List(n.t.Context(), metav1.ListOptions{})
	require.NoError(n.t, err)
	require.Len(n.t, list.Items, 1)
	raw, err := json.Marshal(list.Items[0].Object)
	require.NoError(n.t, err)
	ms, err := modelserver.Read(raw)
	require.NoError(n.t, err)
	return ms
}

const selecting = `, workloadSelector: {matchLabels: {app: m}, pdGroup: {groupKey: group, prefillLabels: {role: ` +
	`prefill}, decodeLabels: {role: decode}}}`

// servesPair starts a gateway that serves the model m over two engines, for a ModelServer of this name.
func servesPair(t *testing.T, name string) (*namespace, *program) {
	t.Helper()
	n := newNamespace(t)
	g := n.serve()
	n.engines("nixl", "m", "a", map[string]string{"app": "m"})
	n.modelServer(name, `{model: m, kvConnector: {type: nixl}`+selecting+`}`)
	n.becomes(g, "m", http.StatusOK)
	return n, g
}

// A ModelServer comes, changes, changes wrongly, and goes, while requests run: none fails that one of its forms could
// have served.
func TestAModelServerChangesWhileRequestsRun(t *testing.T) {
	n := newNamespace(t)
	g := n.serve()
	eventually(t, func() bool {
		status, body := g.ready()
		require.Equal(t, http.StatusServiceUnavailable, status)
		return strings.Contains(body, "there is no ModelServer")
	})
	n.engines("nixl", "m", "a", map[string]string{"app": "m"})
	n.modelServer("m", `{model: m, kvConnector: {type: nixl}`+selecting+`}`)
	n.becomes(g, "m", http.StatusOK)

	tr := send(t, g.client+"/v1/completions", func(int64) string { return completionOf("m") }, 200)
	for i := range 5 {
		n.modelServer("m", fmt.Sprintf(`{model: m, kvConnector: {type: nixl, retry: {maxAttempts: %d}}%s}`, 3+
			i, selecting))
		n.logged(g, fmt.Sprintf("ModelServer is served.*generation=%d", 2+i))
	}
	n.modelServer("m", `{model: m, kvConnector: {type: nixl, config: {leaseDuration: never}}`+selecting+`}`)
	n.logged(g, "a ModelServer is not served as it is.*leaseDuration: is not a duration.*servedAsBefore=true")
	assert.Contains(t, g.page("/debug/pd"), `"rejected"`)
	n.modelServer("m", `{model: m, kvConnector: {type: http}`+selecting+`}`)
	n.logged(g, "ModelServer is served.*connector=http")
	assert.Empty(t, tr.end(), "of %d requests; %s", tr.sent.Load(), g.log)
	assert.Positive(t, tr.sent.Load())
	assert.NotContains(t, g.page("/debug/pd"), `"rejected"`)

	n.remove("m")
	n.becomes(g, "m", http.StatusNotFound)
	n.modelServer("m", `{model: m, kvConnector: {type: nixl}`+selecting+`}`)
	n.becomes(g, "m", http.StatusOK)
}

// logged waits for a line of the gateway's log.
func (n *namespace) logged(g *program, pattern string) {
	n.t.Helper()
	wanted := regexp.MustCompile(pattern)
	eventually(n.t, func() bool {
		for line := range strings.SplitSeq(g.log.String(), "\n") {
			if wanted.MatchString(line) {
				return true
			}
		}
		return false
	}, "%s\n%s", pattern, g.log)
}

// A user who may write ModelServers in a namespace cannot make the gateway send requests to other hosts.
func TestAnObjectLeadsNowhereElse(t *testing.T) {
	n := newNamespace(t)
	for name, discovery := range map[string]string{
		"static": `{static: {endpoints: [{url: "http://127.0.0.1:1", role: both}]}}`,
		"file":   `{file: {path: /etc/hostname}}`, "dns": `{dns: {decode: d.example, port: 1}}`,
		"registration":       `{registration: {http: "127.0.0.1:0"}}`,
		"another kubeconfig": `{kubernetes: {kubeconfig: /etc/kubernetes/admin.conf}}`,
		"another namespace":  `{kubernetes: {namespace: kube-system}}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseObject(objectOf(n.name, `{model: m, discovery: `+discovery+`}`), n.Admin())
			require.ErrorContains(t, err, "spec.discovery.")
		})
	}
	_, err := parseObject(objectOf(n.name, `{model: m, discovery: {kubernetes: {service: s, port: 8100}}}`), n.Admin())
	require.NoError(t, err)
}

// If two objects name the same model, the one that serves it keeps it, and the other is reported as rejected.
func TestAModelHasOneServer(t *testing.T) {
	n, g := servesPair(t, "second")
	n.modelServer("first", `{model: m, kvConnector: {type: sglang}}`)
	n.logged(g, "not served as it is.*name=.*first.*spec.model is served by.*second")
	n.becomes(g, "m", http.StatusOK)
	n.remove("second")
	n.logged(g, "ModelServer is served.*name=.*first")
	n.becomes(g, "m", http.StatusServiceUnavailable)
}

// A stream that runs when its ModelServer goes is served to its end.
func TestAStreamOutlivesItsModelServer(t *testing.T) {
	n := newNamespace(t)
	g := n.serve()
	ips := [2]string{podIP(), podIP()}
	hold := make(chan struct{})
	for i, role := range []string{"prefill", "decode"} {
		e := listenEngine(t, net.JoinHostPort(ips[i], "8000"))
		e.set(func(e *engine) { e.hold = hold })
		n.pod(role, ips[i], map[string]string{"app": "m", "role": role, "group": "a"}, nil)
	}
	n.modelServer("m", `{model: m, kvConnector: {type: http}`+selecting+`}`)
	n.becomes(g, "m", http.StatusOK)
	s := openStream(t, g)
	n.remove("m")
	n.becomes(g, "m", http.StatusNotFound)
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
}

// A changed ModelServer does not try the engines again that are known not to answer.
func TestASuccessorKnowsWhoDoesNotAnswer(t *testing.T) {
	n := newNamespace(t)
	g := n.serve()
	n.engines("nixl", "m", "a", map[string]string{"app": "m"})
	for i := range 4 {
		for _, role := range []string{"prefill", "decode"} { // ready, says the cluster, and nobody listens
			n.pod(fmt.Sprintf("dead-%s-%d", role, i), podIP(),
				map[string]string{"app": "m", "group": "a", "role": role}, nil)
		}
	}
	spec := func(attempts int) string {
		found := []string{otherwise, selecting}[attempts%2]
		return fmt.Sprintf(`{model: m, kvConnector: {type: nixl, retry: {maxAttempts: %d}}%s}`, attempts, found)
	}
	n.modelServer("m", spec(1))
	eventually(t, func() bool {
		debug := g.page("/debug/pd")
		return strings.Count(debug, `"healthy": false`) == 8
	}, "%s", g.log)

	tr := send(t, g.client+"/v1/completions", func(int64) string { return completionOf("m") }, 200)
	n.modelServer("m", spec(2))
	n.logged(g, "ModelServer is served.*generation=2")
	n.modelServer("m", spec(1))
	n.logged(g, "ModelServer is served.*generation=3")
	assert.Empty(t, tr.end(), "of %d requests; %s", tr.sent.Load(), g.log)
	assert.Positive(t, tr.sent.Load())
}

// What one object says is bounded in logs and responses, and read once.
func TestAnEnormousObjectIsRefusedInAFewWords(t *testing.T) {
	var config strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&config, "k%d: 1, ", i)
	}
	ms := objectOf("default", `{model: m, kvConnector: {type: nixl, config: {`+config.String()+`}}}`)
	c := &cluster{faulty: map[string]faulty{}}
	_, err := c.parse(ms)
	require.ErrorContains(t, err, "and 4980 more")
	assert.Less(t, len(shorten(err.Error())), 1010)
	_, again := c.parse(ms)
	assert.Same(t, err, again)
	_, err = c.parse(objectOf("default", `{model: m}`))
	require.NoError(t, err)
	assert.Empty(t, c.faulty)
}

// The program that a kubeconfig names for credentials may hang. The gateway still ends in time.
func TestAHangingCredentialProgramDoesNotKeepTheGateway(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(file, []byte(`apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users:
- name: u
  user:
    exec: {apiVersion: client.authentication.k8s.io/v1, command: sleep, args: ["3"], interactiveMode: Never}
`), 0o600))
	g := start(t, gatewayYAML(fmt.Sprintf(", drainTimeout: 100ms, modelServers: {kubeconfig: %q}", file)))
	time.Sleep(100 * time.Millisecond)
	g.signal()
	began := time.Now()
	g.ended(exitOK)
	assert.Less(t, time.Since(began), 8*time.Second)
	time.Sleep(time.Until(began.Add(9 * time.Second))) // for whoever looks for leaks
}

// When a ModelServer is deleted, the ports of its connector are free again.
func TestAListenerEndsWithItsModelServer(t *testing.T) {
	n := newNamespace(t)
	g := n.serve()
	addr := "127.0.0.1:" + unusedPort(t)
	n.modelServer("m", `{model: m, kvConnector: {type: lmcache-pd, config: {notifyListen: "`+addr+`"}}`+selecting+`}`)
	n.logged(g, "a ModelServer is served")
	conn, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	n.remove("m")
	isFree(t, addr, "%s", g.log)
}

// The API server takes the Deployment that the project ships, and the gateway its configuration.
func TestTheDeploymentIsGood(t *testing.T) {
	n := newNamespace(t)
	manifest, err := os.ReadFile("kubernetes.yaml")
	require.NoError(t, err)
	n.apply(string(manifest))
	m, err := n.Client().CoreV1().ConfigMaps(n.name).Get(t.Context(), "pdkit-gateway", metav1.GetOptions{})
	require.NoError(t, err)
	code, stdout, stderr := check(t, "-config", write(t, m.Data["gateway.yaml"]))
	assert.Equal(t, exitOK, code, stderr)
	assert.Contains(t, stdout, "ModelServers  those of namespace llm, too")
}

// otherwise finds the same engines in another way, so that those that are known do not count.
const otherwise = `, workloadPort: {port: 8000}` + selecting

// A changed ModelServer takes over when its engines are known, however long that takes; nothing else waits for it.
func TestASuccessorIsWaitedFor(t *testing.T) {
	n, g := servesPair(t, "m")

	n.rights("endpointslices") // and pods no more
	n.modelServer("m", `{model: m, kvConnector: {type: http}`+otherwise+`}`)
	n.modelServer("other", `{model: other, kvConnector: {type: nixl}`+selecting+`}`)
	n.logged(g, "ModelServer is served.*model=other")
	for range 20 {
		status, _, body := g.complete(completionOf("m"))
		require.Equal(t, http.StatusOK, status, body)
	}
	assert.NotContains(t, g.log.String(), "connector=http")
	assert.Contains(t, g.page("/debug/pd"), "its engines are not known yet")

	n.rights("pods")
	n.logged(g, "ModelServer is served.*connector=http")
	n.becomes(g, "m", http.StatusOK)
	assert.NotContains(t, g.page("/debug/pd"), "its engines are not known yet")
}

// One that was to take over and never has ends with the gateway, and what it listens on with it.
func TestASuccessorThatNeverServedEndsWithTheGateway(t *testing.T) {
	n, g := servesPair(t, "m")
	n.rights("endpointslices")
	addr := "127.0.0.1:" + unusedPort(t)
	n.modelServer("m", `{model: m, kvConnector: {type: lmcache-pd, config: {notifyListen: "`+addr+`"}}`+otherwise+`}`)
	eventually(t, func() bool {
		conn, err := net.Dial("tcp", addr)
		return err == nil && conn.Close() == nil
	}, "%s", g.log)
	g.signal()
	g.ended(exitOK)
	isFree(t, addr, "%s", g.log)
}

// rights lets the gateway's account list and watch ModelServers and this resource, and nothing else.
func (n *namespace) rights(resource string) {
	n.t.Helper()
	roles := n.Client().RbacV1().Roles(n.name)
	all, err := roles.List(n.t.Context(), metav1.ListOptions{})
	require.NoError(n.t, err)
	require.Len(n.t, all.Items, 1)
	role := &all.Items[0]
	role.Rules = []rbacv1.PolicyRule{
		{APIGroups: []string{"networking.matrixinfer.ai", "networking.serving.volcano.sh"},
			Resources: []string{"modelservers"}, Verbs: []string{"list", "watch"}},
		{APIGroups: []string{"", "discovery.k8s.io"}, Resources: []string{resource}, Verbs: []string{"list", "watch"}},
	}
	_, err = roles.Update(n.t.Context(), role, metav1.UpdateOptions{})
	require.NoError(n.t, err)
	// The API server's authorizer takes it over by a watch of its own, so it is asked until it has.
	for _, about := range []string{"pods", "endpointslices"} {
		eventually(n.t, func() bool { return n.may(about) == (about == resource) }, about)
	}
}

// may asks the API server whether the gateway's account may watch a resource.
func (n *namespace) may(resource string) bool {
	n.t.Helper()
	group := map[string]string{"endpointslices": "discovery.k8s.io"}[resource]
	review, err := n.Client().AuthorizationV1().SubjectAccessReviews().Create(n.t.Context(),
		&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: "system:serviceaccount:" + n.name + ":pdkit-gateway",
			ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: n.name, Verb: "watch", Group: group,
				Resource: resource}}}, metav1.CreateOptions{})
	require.NoError(n.t, err)
	return review.Status.Allowed
}

// Objects that change their models at once take them from each other as the list says, and one that wants a model which
// another keeps stays what it was.
func TestModelsGoRound(t *testing.T) {
	n := newNamespace(t)
	g := n.serve()
	n.engines("nixl", "m1", "a", map[string]string{"app": "m"})
	spec := func(model string, attempts int) string {
		return fmt.Sprintf(`{model: %s, kvConnector: {type: http, retry: {maxAttempts: %d}}%s}`, model, attempts,
			selecting)
	}
	n.modelServer("a", spec("m1", 1))
	n.modelServer("b", spec("m2", 1))
	n.logged(g, "is served.*model=m1")
	n.logged(g, "is served.*model=m2")
	served := func() (names map[string]string) {
		names = map[string]string{}
		var debug struct {
			Models []struct{ Model, Name string }
		}
		body := g.page("/debug/pd")
		require.NoError(t, json.Unmarshal([]byte(body), &debug))
		for _, m := range debug.Models {
			require.Empty(t, names[m.Model], "each model has one server: %s", body)
			names[m.Model] = strings.TrimPrefix(m.Name, n.name+"/")
		}
		return names
	}
	n.modelServer("a", spec("m2", 1))
	n.logged(g, "not served as it is.*name=.*/a of.*spec.model is served by .*/b of")
	assert.Equal(t, map[string]string{"m1": "a", "m2": "b"}, served())

	n.modelServer("b", spec("m1", 1)) // now both change: m1 and m2 go round
	require.Eventually(t, func() bool {
		names := served()
		return names["m1"] == "b" && names["m2"] == "a"
	}, 45*time.Second, 50*time.Millisecond, "%s", g.log)
	assert.NotContains(t, g.page("/debug/pd"), `"rejected"`)
}

// listenEngine is newEngine at an address.
func listenEngine(t *testing.T, addr string, models ...string) *engine {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	require.NoError(t, err)
	e := &engine{models: models}
	e.Server = httptest.NewUnstartedServer(e)
	require.NoError(t, e.Listener.Close())
	e.Listener = ln
	e.Start()
	t.Cleanup(e.Close)
	return e
}

// objectOf is a ModelServer as the watch tells it.
func objectOf(namespace, spec string) kubernetes.ModelServer {
	object := `{apiVersion: networking.matrixinfer.ai/v1alpha1, kind: ModelServer, metadata: {name: m, namespace: ` +
		namespace + `}, spec: ` + spec + `}`
	docs, _ := yamlfile.Read("object", []byte(object))
	return kubernetes.ModelServer{Group: "networking.matrixinfer.ai", Namespace: namespace, Name: "m",
		Object: docs[0].JSON}
}
