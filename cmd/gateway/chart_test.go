// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
)

// helm runs the real helm against the test's cluster.
func (n *namespace) helm(args ...string) string {
	n.t.Helper()
	cmd := exec.CommandContext(n.t.Context(), kubetest.Program(n.t), append([]string{"helm"}, args...)...)
	home := n.t.TempDir()
	cmd.Env = append(os.Environ(), "KUBECONFIG="+n.Kubeconfig(n.t, n.Admin()), "HELM_NAMESPACE="+n.name,
		"HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	var stderr strings.Builder // warnings, too
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(n.t, err, "helm %s\n%s%s", strings.Join(args, " "), out, &stderr)
	return string(out)
}

// The chart passes helm lint, and a real API server takes what it renders: with the least values that it needs, with
// all of them, and from the one to the other by an upgrade.
func TestTheChart(t *testing.T) {
	n := newNamespace(t)
	var least []string // the image is then the one that cmd/images makes
	all := []string{"-f", "testdata/chart/all.yaml"}
	for _, values := range [][]string{least, all} {
		assert.Contains(t, n.helm(append([]string{"lint", "--strict", "chart"}, values...)...), "0 chart(s) failed")
	}
	n.helm(append([]string{"install", "pd", "chart", "--skip-crds"}, least...)...)
	d, err := n.Client().AppsV1().Deployments(n.name).Get(t.Context(), "pd", metav1.GetOptions{})
	require.NoError(t, err)
	assert.EqualValues(t, 2, *d.Spec.Replicas)
	n.helm(append([]string{"upgrade", "pd", "chart", "--skip-crds"}, all...)...)
	d, err = n.Client().AppsV1().Deployments(n.name).Get(t.Context(), "pd", metav1.GetOptions{})
	require.NoError(t, err)
	pod := d.Spec.Template.Spec
	assert.Equal(t, []string{"-config", "/etc/pdkit/gateway.yaml", "-pick", "prefix", "-inspect", "10s"},
		pod.Containers[0].Args)
	assert.Equal(t, "registry.example/pdkit-gateway:v1", pod.Containers[0].Image)
	models, err := n.objects().Get(t.Context(), "llama", metav1.GetOptions{})
	require.NoError(t, err)
	assert.Equal(t, "llama", models.Object["spec"].(map[string]any)["model"])

	// The gateway reads the file that the pods get, and its drain fits into the time that Kubernetes gives it.
	c, err := n.Client().CoreV1().ConfigMaps(n.name).Get(t.Context(), "pd", metav1.GetOptions{})
	require.NoError(t, err)
	code, _, stderr := check(t, "-config", write(t, c.Data["gateway.yaml"]))
	assert.Equal(t, exitOK, code, stderr)
	var file struct {
		Spec struct {
			DrainTimeout string `yaml:"drainTimeout"`
		}
	}
	require.NoError(t, yaml.Unmarshal([]byte(c.Data["gateway.yaml"]), &file))
	drain, err := time.ParseDuration(file.Spec.DrainTimeout)
	require.NoError(t, err)
	assert.Greater(t, time.Duration(*pod.TerminationGracePeriodSeconds)*time.Second,
		drain+time.Duration(pod.Containers[0].Lifecycle.PreStop.Sleep.Seconds)*time.Second)
}

// The chart's route is one of the Gateway API's own definition.
func TestTheChartsRoute(t *testing.T) {
	n := newNamespace(t)
	definition, err := os.ReadFile(filepath.Join(filepath.Dir(kubetest.Program(t)), "httproutes.yaml"))
	require.NoError(t, err)
	n.Apply(t, n.Admin(), definition, n.name)
	route := n.helm("template", "pd", "chart", "-s", "templates/network.yaml", "--set",
		"httpRoute.enabled=true,httpRoute.parentRefs[0].name=public,httpRoute.hostnames[0]=llm.test")
	require.Contains(t, route, "kind: HTTPRoute")
	n.apply(route)
}

// The chart's role is that of discovery/kubernetes/manifests.
func TestTheChartsRightsAreTheManifests(t *testing.T) {
	rules := func(text string) any {
		t.Helper()
		for document := range strings.SplitSeq(text, "\n---\n") {
			var object map[string]any
			require.NoError(t, yaml.Unmarshal([]byte(document), &object))
			if object["kind"] == "Role" {
				return object["rules"]
			}
		}
		require.Fail(t, "no Role")
		return nil
	}
	manifest, err := os.ReadFile(manifests + "rbac.yaml")
	require.NoError(t, err)
	rendered := newNamespace(t).helm("template", "pd", "chart", "-s",
		"templates/gateway.yaml")
	assert.Equal(t, rules(string(manifest)), rules(rendered))
}
