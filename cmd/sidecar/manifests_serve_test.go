// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

// decodePod is a decode pod of a manifest on this machine: its sidecar is the built program with the container's
// command line and environment, its engine is a simulated one, and there is a prefill engine besides.
type decodePod struct {
	t         *testing.T
	namespace string
	spec      *corev1.PodSpec
	sidecar   *corev1.Container
	client    *http.Client
	scheme    string
	ports     map[int]string // of the pod's ports, those on this machine
	prefill   string         // HOST:PORT, as the scheduler names it
	p, d      *enginesim.Engine
	cmd       *exec.Cmd
	log       *sharedtest.Log
}

// newDecodePod starts a pod's engines. The prefill engine has the address at, or any for "". If certificates is a
// folder, they serve over TLS with the certificate there.
func newDecodePod(t *testing.T, spec *corev1.PodSpec, at, certificates string) *decodePod {
	t.Helper()
	x := &decodePod{t: t, namespace: "ns", spec: spec, sidecar: &spec.InitContainers[0], log: &sharedtest.Log{},
		scheme: "http", client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	x.p, x.d = twoEngines(t, enginesim.Config{Listen: at}, enginesim.Config{ITL: 20 * time.Millisecond})
	prefill, decode := x.p.URL(), x.d.URL()
	if certificates != "" {
		x.scheme = "https"
		x.client.Transport = &http.Transport{DisableKeepAlives: true, // the kubelet checks no certificate either
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
		prefill, decode = overTLS(t, prefill, certificates), overTLS(t, decode, certificates)
	}
	x.prefill = hostPort(t, prefill)
	x.ports = map[int]string{
		int(x.sidecar.Ports[0].ContainerPort):          strconv.Itoa(ports(t, 1)),
		int(spec.Containers[0].Ports[0].ContainerPort): portOf(t, decode),
	}
	return x
}

// start runs the sidecar. In its command line and environment only the pod's ports and the keys of local are replaced.
// The variables env and the arguments more are added.
func (x *decodePod) start(local map[string]string, env []string, more ...string) {
	x.t.Helper()
	var pairs []string
	for flag, port := range map[string]int32{"--port=": x.sidecar.Ports[0].ContainerPort,
		"--model-server-port=": x.spec.Containers[0].Ports[0].ContainerPort,
		"--vllm-port=":         x.spec.Containers[0].Ports[0].ContainerPort} {
		pairs = append(pairs, flag+strconv.Itoa(int(port)), flag+x.ports[int(port)])
	}
	for from, to := range local {
		pairs = append(pairs, from, to)
	}
	replacer := strings.NewReplacer(pairs...)
	args := append(append([]string{}, x.sidecar.Command...), x.sidecar.Args...)
	if len(x.sidecar.Command) > 0 {
		args = args[1:] // the program
	}
	var values []string
	for _, v := range x.sidecar.Env {
		value := v.Value
		if v.ValueFrom != nil {
			require.Equal(x.t, "metadata.namespace", v.ValueFrom.FieldRef.FieldPath)
			value = x.namespace
		}
		env = append(env, v.Name+"="+replacer.Replace(value))
		values = append(values, "$("+v.Name+")", value)
	}
	for i, arg := range args { // as the kubelet does
		args[i] = replacer.Replace(strings.NewReplacer(values...).Replace(arg))
	}
	x.cmd = command(context.Background(), x.t, append(args, more...)...)
	x.cmd.Env, x.cmd.Stderr = append(env, asProgram+"=1"), x.log
	require.NoError(x.t, x.cmd.Start())
	x.t.Cleanup(func() { _ = x.cmd.Process.Kill() }) // if the test has failed before the end
	require.Eventually(x.t, func() bool { return strings.Contains(x.log.String(), "msg=serving") }, 20*time.Second,
		5*time.Millisecond, "%s", x.log)
}

// probed asks what the kubelet asks.
func (x *decodePod) probed() {
	x.t.Helper()
	asked := 0
	for _, c := range []*corev1.Container{x.sidecar, &x.spec.Containers[0]} {
		for _, p := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
			if p == nil {
				continue
			}
			port := p.HTTPGet.Port.IntValue()
			for _, named := range c.Ports {
				if named.Name == p.HTTPGet.Port.StrVal && named.Name != "" {
					port = int(named.ContainerPort)
				}
			}
			require.Contains(x.t, x.ports, port, "a probe of %s is at no port of the pod", c.Name)
			scheme := strings.ToLower(string(p.HTTPGet.Scheme))
			if scheme == "" {
				scheme = "http"
			}
			status, _, _ := ask(x.t, x.client, http.MethodGet, scheme+"://127.0.0.1:"+x.ports[port]+p.HTTPGet.Path, "")
			assert.Equal(x.t, http.StatusOK, status, "%s of %s", p.HTTPGet.Path, c.Name)
			asked++
		}
	}
	assert.GreaterOrEqual(x.t, asked, 2)
}

// send sends a request as the scheduler forwards it.
func (x *decodePod) send(stream bool, headers ...string) (*http.Response, error) {
	x.t.Helper()
	at := x.scheme + "://127.0.0.1:" + x.ports[int(x.sidecar.Ports[0].ContainerPort)]
	req, err := http.NewRequestWithContext(x.t.Context(), http.MethodPost, at+"/v1/completions",
		strings.NewReader(completion(0, stream)))
	require.NoError(x.t, err)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return x.client.Do(req)
}

// serves sends requests until both engines serve one, which they do once the sidecar knows the prefill engine.
func (x *decodePod) serves() {
	x.t.Helper()
	require.Eventually(x.t, func() bool {
		resp, err := x.send(false, header, x.prefill)
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return err == nil && resp.StatusCode == http.StatusOK && resp.Header.Get("X-Pd-Mode") == "disaggregated" &&
			text(string(body)) != ""
	}, 30*time.Second, 50*time.Millisecond, "%s", x.log)
	assert.Len(x.t, x.p.Requests(), 1)
	assert.Positive(x.t, x.d.Stats().ExternalKVTransfer)
	resp, err := x.send(false, header, "127.9.9.9:1")
	require.NoError(x.t, err)
	defer resp.Body.Close()
	assert.Equal(x.t, http.StatusForbidden, resp.StatusCode, "an engine that is not listed")
}

// ends sends SIGTERM while a stream runs. The stream goes on to its end, and the program ends with 0, in the time that
// Kubernetes gives the pod.
func (x *decodePod) ends() {
	x.t.Helper()
	resp, err := x.send(true, header, x.prefill)
	require.NoError(x.t, err)
	defer resp.Body.Close()
	require.Equal(x.t, http.StatusOK, resp.StatusCode)
	began := time.Now()
	require.NoError(x.t, x.cmd.Process.Signal(syscall.SIGTERM))
	body, err := io.ReadAll(resp.Body)
	require.NoError(x.t, err)
	assert.Contains(x.t, string(body), "[DONE]")
	require.NoError(x.t, x.cmd.Wait(), "%s", x.log)
	assert.Less(x.t, time.Since(began), time.Duration(*x.spec.TerminationGracePeriodSeconds)*time.Second)
	assert.Contains(x.t, x.log.String(), "draining")
}

// overTLS serves an engine over TLS with the certificate of a folder.
func overTLS(t *testing.T, engine, certificates string) string {
	t.Helper()
	u, err := url.Parse(engine)
	require.NoError(t, err)
	pair, err := tls.LoadX509KeyPair(filepath.Join(certificates, "tls.crt"), filepath.Join(certificates, "tls.key"))
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(u)
	proxy.Transport, proxy.FlushInterval = &http.Transport{DisableKeepAlives: true}, -1
	s := httptest.NewUnstartedServer(fullDuplex(proxy))
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL
}

// fullDuplex keeps a reverse proxy from breaking a response off now and then (golang/go#40747).
func fullDuplex(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		next.ServeHTTP(w, r)
	})
}

// kserveCertificate writes a certificate as KServe's controller makes one for all pods of a service: it signs itself,
// and it is for localhost and their addresses (kserve/kserve@aaac4e2, pkg/controller/v1alpha2/llmisvc/
// workload_tls_self_signed.go).
func kserveCertificate(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	about := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, IsCA: true,
		BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	certificate, err := x509.CreateCertificate(rand.Reader, about, about, key.Public(), key)
	require.NoError(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	dir := t.TempDir()
	for name, block := range map[string]*pem.Block{"tls.crt": {Type: "CERTIFICATE", Bytes: certificate},
		"tls.key": {Type: "PRIVATE KEY", Bytes: secret}} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
	return dir
}

// Each manifest's sidecar is run as its container says. The only additions are where the engines are: this machine has
// neither the cluster's DNS nor, in the first cases, an API server, so that --prefillers stands in for the pool.
func TestTheSidecarOfEachManifestServes(t *testing.T) {
	t.Parallel()
	t.Run("llm-d", func(t *testing.T) {
		x := newDecodePod(t, decodeOfLLMD(t), "", "")
		x.start(nil, nil, "--prefillers="+x.prefill)
		x.probed()
		x.serves()
		x.ends()
	})
	t.Run("llm-d-overlay", func(t *testing.T) {
		x := newDecodePod(t, overlaid(t, "sidecar.yaml"), "", "")
		_, port, err := net.SplitHostPort(x.prefill)
		require.NoError(t, err)
		x.start(map[string]string{"--prefillers-dns=prefillers:8000": "--prefillers-dns=prefillers:" + port},
			nil, "--prefillers-dns-server="+nameServer(t))
		x.probed()
		x.serves()
		x.ends()
	})
	t.Run("KServe", func(t *testing.T) {
		x := newDecodePod(t, configured(t, false), "", "")
		x.start(nil, nil, "--prefillers="+x.prefill)
		x.probed()
		x.serves()
		x.ends()
	})
	t.Run("KServe with TLS", func(t *testing.T) {
		certificates := kserveCertificate(t)
		x := newDecodePod(t, configured(t, true), "", certificates)
		x.start(map[string]string{"/var/run/kserve/tls": certificates}, nil,
			"--prefillers="+x.prefill)
		x.probed()
		x.serves()
		x.ends()
	})
	// A real API server takes the manifest, and the sidecar reads the manifest's pool there with the manifest's rights.
	t.Run("llm-d, on an API server", func(t *testing.T) {
		n := newPlace(t, poolGroup, "v1")
		x := newDecodePod(t, decodeOfLLMD(t), net.JoinHostPort("127.8.5.1", strconv.Itoa(ports(t, 1))), "")
		manifest, err := os.ReadFile("manifests/llm-d.yaml")
		require.NoError(t, err)
		_, port, err := net.SplitHostPort(x.prefill)
		require.NoError(t, err)
		n.apply(strings.NewReplacer("namespace: llm-d", "namespace: "+n.name, "number: 8000", "number: "+port).
			Replace(string(manifest)))
		x.namespace = n.name
		x.start(nil, []string{"KUBECONFIG=" + n.Kubeconfig(t, n.Token(t, n.name, x.spec.ServiceAccountName))})
		resp, err := x.send(false, header, x.prefill)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, http.StatusForbidden, resp.StatusCode, "the pool has no pods")
		d, err := n.Client().AppsV1().Deployments(n.name).Get(t.Context(), "prefill", metav1.GetOptions{})
		require.NoError(t, err)
		n.CreatePod(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: n.name, Name: "prefill-0",
			Labels: d.Spec.Template.Labels}, Spec: d.Spec.Template.Spec})
		n.SetPod(t, n.name, "prefill-0", "127.8.5.1", true)
		x.serves()
		x.ends()
	})
}

// The overlay's service, and the pods that the overlay and KServe's configuration lead to, are valid for a real API
// server.
func TestAnAPIServerTakesTheOtherManifests(t *testing.T) {
	n := newPlace(t, poolGroup, "v1")
	service, err := os.ReadFile("manifests/llm-d-overlay/prefillers.yaml")
	require.NoError(t, err)
	n.apply(string(service))
	for name, spec := range map[string]*corev1.PodSpec{"overlaid": overlaid(t, "sidecar.yaml"),
		"configured": configured(t, true)} {
		n.CreatePod(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: n.name, Name: name}, Spec: *spec})
	}
}
