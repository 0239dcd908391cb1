// SPDX-License-Identifier: Apache-2.0

// Package kubetest runs a real Kubernetes API server with etcd for tests: two processes on loopback, ready in about 3
// seconds, without containers or nodes. testdata/install.sh of the parent folder builds them.
//
//	func TestMain(m *testing.M) { kubetest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		c := kubetest.Shared(t)
//		namespace := c.Namespace(t)
//		c.Pod(t, namespace, "prefill-0", map[string]string{"role": "prefill"}, nil)
//		c.SetPod(t, namespace, "prefill-0", "127.0.0.11", true)
//
// A test that stops the server, or changes what all namespaces share, uses [Start] to get a cluster of its own.
//
// There is no kubelet and no scheduler, so pods have the state that a test gives them. There is no namespace
// controller, so namespaces are never emptied. Methods of a [Cluster] are safe for concurrent use, except KillAPIServer
// and StartAPIServer.
package kubetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdkit/pdkit/enginesim/freeport"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// patience bounds each wait for a server. It is long, since other jobs may share the cores.
const patience = 2 * time.Minute

// Cluster is an API server and its etcd.
type Cluster struct {
	options   options
	dir       string
	binary    string
	keys      *keys
	plain     http.RoundTripper // to etcd
	etcdURL   string
	apiURL    string
	apiPort   string
	etcd      *process
	apiServer *process // nil between KillAPIServer and StartAPIServer
	manager   *process // nil without WithControllers
	client    *kubernetes.Clientset
}

type options struct {
	controllers bool
	flags       []string
}

// Option changes what [Start] starts.
type Option func(*options)

// WithControllers also runs kube-controller-manager, with only the controller that makes the EndpointSlices of
// services. That controller leaves out pods whose node does not exist and addresses of 127.0.0.0/8.
func WithControllers() Option { return func(o *options) { o.controllers = true } }

// WithAPIServerFlags adds flags for the API server. With --min-request-timeout=3 it ends each watch after 3 to 6
// seconds.
func WithAPIServerFlags(flags ...string) Option {
	return func(o *options) { o.flags = append(o.flags, flags...) }
}

// Start starts a cluster for one test and stops it at the test's end. If the servers are not installed, it skips the
// test; with CI=true it fails it.
func Start(t testing.TB, o ...Option) *Cluster {
	t.Helper()
	c, err := launch(Program(t), o...)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log("end of the API server's log:\n" + c.log("kube-apiserver"))
		}
		c.stop()
	})
	return c
}

// shared is the cluster that all tests of one binary use, since starting one takes longer than most tests.
var shared struct {
	sync.Mutex
	cluster *Cluster
	err     error
}

// Shared returns the cluster that all tests of the binary share. Each test uses a [Cluster.Namespace] of its own. The
// first call starts the cluster; [Main], which the package's TestMain must call, stops it.
func Shared(t testing.TB) *Cluster {
	t.Helper()
	binary := Program(t)
	shared.Lock()
	defer shared.Unlock()
	if shared.cluster == nil && shared.err == nil {
		shared.cluster, shared.err = launch(binary)
	}
	require.NoError(t, shared.err)
	return shared.cluster
}

// Main runs the tests, stops the shared cluster, looks for leaked goroutines, and ends the process.
func Main(m goleak.TestingM, o ...goleak.Option) { goleak.VerifyTestMain(tests{m}, o...) }

type tests struct{ m goleak.TestingM }

func (t tests) Run() int {
	code := t.m.Run()
	shared.Lock()
	defer shared.Unlock()
	if shared.cluster != nil {
		shared.cluster.stop()
	}
	return code
}

// Program returns the path of the servers' binary, under the root of the repository; with the argument helm it is helm.
// Where it is missing the test is skipped, but in CI it fails.
func Program(t testing.TB) string {
	t.Helper()
	_, file, _, ok := runtime.Caller(0)
	require.True(t, ok)
	binary := filepath.Join(filepath.Dir(file), "../../../.tools/kubernetes/kubeservers")
	if _, err := os.Stat(binary); err != nil {
		if os.Getenv("CI") == "true" { //nolint:forbidigo // in CI no test is skipped
			t.Fatal("discovery/kubernetes/testdata/install.sh has not been run: ", err)
		}
		t.Skip("no Kubernetes API server is installed: run discovery/kubernetes/testdata/install.sh")
	}
	return binary
}

// launch starts a cluster. If a server ends at once, launch tries other ports, since another process may have taken
// one.
func launch(binary string, o ...Option) (*Cluster, error) {
	var err error
	for range 3 {
		var c *Cluster
		if c, err = launchOnce(binary, o...); err == nil {
			return c, nil
		}
		if !errors.Is(err, errEnded) {
			break
		}
	}
	return nil, err
}

func launchOnce(binary string, o ...Option) (*Cluster, error) {
	var ports [3]string
	first, err := freeport.Find(len(ports))
	if err != nil {
		return nil, err
	}
	for i := range ports {
		ports[i] = strconv.Itoa(first + i)
	}
	dir, err := os.MkdirTemp("", "kubetest-")
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		dir: dir, binary: binary, apiPort: ports[2],
		plain:   &http.Transport{DisableKeepAlives: true},
		etcdURL: "http://127.0.0.1:" + ports[0], apiURL: "https://127.0.0.1:" + ports[2],
	}
	for _, set := range o {
		set(&c.options)
	}
	if err := c.launch("http://127.0.0.1:" + ports[1]); err != nil {
		err = fmt.Errorf("%w\netcd: %s\nkube-apiserver: %s", err, c.log("etcd"), c.log("kube-apiserver"))
		c.stop()
		return nil, err
	}
	return c, nil
}

func (c *Cluster) launch(peers string) error {
	var err error
	if c.keys, err = writeKeys(c.dir); err != nil {
		return err
	}
	c.etcd, err = c.run("etcd", "--data-dir="+c.path("etcd"), "--name=default", "--log-level=warn", "--unsafe-no-fsync",
		"--listen-client-urls="+c.etcdURL, "--advertise-client-urls="+c.etcdURL,
		"--listen-peer-urls="+peers, "--initial-advertise-peer-urls="+peers, "--initial-cluster=default="+peers)
	if err != nil {
		return err
	}
	if err := c.etcd.await(c.plain, c.etcdURL+"/health"); err != nil {
		return err
	}
	if err := c.startAPIServer(); err != nil {
		return err
	}
	if c.client, err = kubernetes.NewForConfig(c.Admin()); err != nil {
		return err
	}
	if err := c.node(context.Background(), NodeName, ""); err != nil {
		return err
	}
	if !c.options.controllers {
		return nil
	}
	kubeconfig, err := c.writeKubeconfig(c.Admin())
	if err != nil {
		return err
	}
	c.manager, err = c.run("kube-controller-manager", "--kubeconfig="+kubeconfig, "--secure-port=0",
		"--leader-elect=false",
		"--use-service-account-credentials=false", "--controllers=endpointslice-controller")
	return err
}

func (c *Cluster) startAPIServer() error {
	flags := []string{
		"--etcd-servers=" + c.etcdURL, "--bind-address=127.0.0.1", "--secure-port=" + c.apiPort,
		"--advertise-address=127.0.0.1",   // without it the server needs a default route
		"--endpoint-reconciler-type=none", // the server need not be the endpoint of a service
		"--tls-cert-file=" + c.path("server.crt"), "--tls-private-key-file=" + c.path("server.key"),
		"--client-ca-file=" + c.path("ca.crt"), "--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + c.path("sa.key"), "--service-account-signing-key-file=" + c.path("sa.key"),
		"--service-cluster-ip-range=10.96.0.0/16",
		"--disable-admission-plugins=ServiceAccount", // no controller makes the default account that pods would need
		"--enable-priority-and-fairness=false",
	}
	flags = append(flags, c.options.flags...)
	var err error
	if c.apiServer, err = c.run("kube-apiserver", flags...); err != nil {
		return err
	}
	transport, err := rest.TransportFor(c.Admin())
	if err != nil {
		return err
	}
	return c.apiServer.await(transport, c.apiURL+"/readyz")
}

// stop ends all processes and removes their files.
func (c *Cluster) stop() {
	for _, p := range []*process{c.manager, c.apiServer, c.etcd} {
		p.kill()
	}
	_ = os.RemoveAll(c.dir)
}

// KillAPIServer ends the API server at once (SIGKILL), as a crash does: its clients' connections break. The stored
// objects stay.
func (c *Cluster) KillAPIServer() {
	c.apiServer.kill()
	c.apiServer = nil
}

// StartAPIServer starts the killed API server again, on the same port and with the same data, and waits until it is
// ready.
func (c *Cluster) StartAPIServer(t testing.TB) {
	t.Helper()
	require.Nil(t, c.apiServer, "the API server has not been killed")
	if err := c.startAPIServer(); err != nil {
		t.Fatal(err, "\n", c.log("kube-apiserver"))
	}
}

// Compact makes etcd forget all revisions but the current one. After it, and KillAPIServer and StartAPIServer, a watch
// from an old version gets 410, and so does a list that goes on from one.
func (c *Cluster) Compact(t testing.TB) {
	t.Helper()
	var at struct {
		Header struct{ Revision string }
	}
	c.askEtcd(t, "range", map[string]any{"key": "AA==", "limit": 1}, &at)
	c.askEtcd(t, "compaction", map[string]any{"revision": at.Header.Revision, "physical": true}, &at)
}

// askEtcd calls etcd's API in its JSON form.
func (c *Cluster) askEtcd(t testing.TB, method string, request, response any) {
	t.Helper()
	body, err := json.Marshal(request)
	require.NoError(t, err)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.etcdURL+"/v3/kv/"+method,
		bytes.NewReader(body))
	require.NoError(t, err)
	resp, err := c.plain.RoundTrip(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode, "etcd: %s", method)
	require.NoError(t, json.NewDecoder(resp.Body).Decode(response))
}

// Admin returns a configuration with all rights (a client certificate of system:masters) and without rate limits.
func (c *Cluster) Admin() *rest.Config {
	config := c.anonymous()
	config.CertData, config.KeyData = c.keys.adminCert, c.keys.adminKey
	return config
}

func (c *Cluster) anonymous() *rest.Config {
	return &rest.Config{Host: c.apiURL, TLSClientConfig: rest.TLSClientConfig{CAData: c.keys.ca}, QPS: 10000,
		Burst: 10000}
}

// Client returns a client with the rights of [Cluster.Admin].
func (c *Cluster) Client() *kubernetes.Clientset { return c.client }

// ServiceAccount creates an account, and returns a configuration that has only a token of it, valid for an hour.
func (c *Cluster) ServiceAccount(t testing.TB, namespace, name string) *rest.Config {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err := c.client.CoreV1().ServiceAccounts(namespace).Create(t.Context(), account, metav1.CreateOptions{})
	require.NoError(t, err)
	return c.Token(t, namespace, name)
}

// Token does what [Cluster.ServiceAccount] does, for an account that already exists.
func (c *Cluster) Token(t testing.TB, namespace, name string) *rest.Config {
	t.Helper()
	token, err := c.client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), name,
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	require.NoError(t, err)
	config := c.anonymous()
	config.BearerToken = token.Status.Token
	return config
}

// Namespace creates a namespace with a name that no other test has.
func (c *Cluster) Namespace(t testing.TB) string {
	t.Helper()
	ns, err := c.client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	return ns.Name
}

// Kubeconfig writes config as a file, and returns its path.
func (c *Cluster) Kubeconfig(t testing.TB, config *rest.Config) string {
	t.Helper()
	path, err := c.writeKubeconfig(config)
	require.NoError(t, err)
	return path
}

func (c *Cluster) writeKubeconfig(config *rest.Config) (string, error) {
	file, err := os.CreateTemp(c.dir, "kubeconfig-") // CreateTemp chooses the name, WriteToFile writes the content
	if err != nil {
		return "", err
	}
	if err := file.Close(); err != nil {
		return "", err
	}
	return file.Name(), clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{
			"test": {Server: config.Host, CertificateAuthorityData: config.CAData},
		},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"test": {
			ClientCertificateData: config.CertData, ClientKeyData: config.KeyData, Token: config.BearerToken,
		}},
		Contexts:       map[string]*clientcmdapi.Context{"test": {Cluster: "test", AuthInfo: "test"}},
		CurrentContext: "test",
	}, file.Name())
}

func (c *Cluster) path(name string) string { return filepath.Join(c.dir, name) }

// log returns the last warnings and errors in a process's log.
func (c *Cluster) log(name string) string {
	data, err := os.ReadFile(c.path(name + ".log"))
	if err != nil {
		return err.Error()
	}
	lines := slices.DeleteFunc(strings.Split(string(data), "\n"),
		func(line string) bool { return strings.HasPrefix(line, "I") })
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}
