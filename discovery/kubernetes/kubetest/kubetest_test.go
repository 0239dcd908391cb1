// SPDX-License-Identifier: Apache-2.0

package kubetest_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

func TestPodIsWhatTheTestSaysOfIt(t *testing.T) {
	c := kubetest.Shared(t)
	namespace := c.Namespace(t)
	events := watchPods(t, c, namespace, "")

	c.Pod(t, namespace, "prefill-0", map[string]string{"role": "prefill"}, map[string]string{"note": "a"},
		corev1.ContainerPort{Name: "http", ContainerPort: 8100})
	pod := next(t, events, watch.Added)
	assert.Equal(t, kubetest.NodeName, pod.Spec.NodeName)
	assert.Equal(t, int32(8100), pod.Spec.Containers[0].Ports[0].ContainerPort)
	assert.Equal(t, corev1.PodPending, pod.Status.Phase)

	c.SetPod(t, namespace, "prefill-0", "127.0.0.11", true)
	pod = next(t, events, watch.Modified)
	assert.Equal(t, []any{corev1.PodRunning, "127.0.0.11", corev1.ConditionTrue},
		[]any{pod.Status.Phase, pod.Status.PodIP, ready(pod)})

	c.SetPod(t, namespace, "prefill-0", "127.0.0.12", false)
	pod = next(t, events, watch.Modified)
	assert.Equal(t, []any{corev1.PodRunning, "127.0.0.12", corev1.ConditionFalse},
		[]any{pod.Status.Phase, pod.Status.PodIP, ready(pod)})

	c.SetLabels(t, namespace, "prefill-0", map[string]string{"role": "", "group": "1"})
	assert.Equal(t, map[string]string{"group": "1"}, next(t, events, watch.Modified).Labels)
	c.SetAnnotations(t, namespace, "prefill-0", map[string]string{"note": "b"})
	assert.Equal(t, map[string]string{"note": "b"}, next(t, events, watch.Modified).Annotations)

	c.DeletePod(t, namespace, "prefill-0", 30)
	assert.NotNil(t, next(t, events, watch.Modified).DeletionTimestamp, "terminating, and there")
	c.DeletePod(t, namespace, "prefill-0", 0)
	next(t, events, watch.Modified) // the grace is now 0
	next(t, events, watch.Deleted)
}

// A watch that goes on after a long outage, or one of the server's own, is told to list anew.
func TestKilledServerKeepsItsObjectsAndForgetsWhatWasCompacted(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t)
	namespace := c.Namespace(t)
	c.Pod(t, namespace, "prefill-0", nil, nil)
	c.Pod(t, namespace, "prefill-1", nil, nil)
	list, err := c.Client().CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	first, err := c.Client().CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{Limit: 1})
	require.NoError(t, err)
	c.SetPod(t, namespace, "prefill-0", "127.0.0.11", true)
	events := watchPods(t, c, namespace, list.ResourceVersion)
	next(t, events, watch.Modified)

	c.KillAPIServer()
	_, open := <-events
	require.False(t, open, "the watch has broken")
	_, err = c.Client().CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	require.Error(t, err)

	c.StartAPIServer(t)
	pod, err := c.Client().CoreV1().Pods(namespace).Get(t.Context(), "prefill-0", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, "127.0.0.11", pod.Status.PodIP)

	page := metav1.ListOptions{Limit: 1, Continue: first.Continue}
	_, err = c.Client().CoreV1().Pods(namespace).List(t.Context(), page)
	require.NoError(t, err, "etcd knows the old version")
	c.Compact(t)
	_, err = c.Client().CoreV1().Pods(namespace).List(t.Context(), page)
	require.True(t, apierrors.IsResourceExpired(err), "%v", err)
	watcher, err := c.Client().CoreV1().Pods(namespace).Watch(t.Context(),
		metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	require.NoError(t, err)
	defer watcher.Stop()
	event := <-watcher.ResultChan()
	require.Equal(t, watch.Error, event.Type)
	status, ok := event.Object.(*metav1.Status)
	require.True(t, ok)
	assert.Equal(t, []any{int32(http.StatusGone), metav1.StatusReasonExpired}, []any{status.Code, status.Reason})
}

func TestServiceAccountHasNoRightsOfItsOwn(t *testing.T) {
	c := kubetest.Shared(t)
	namespace := c.Namespace(t)
	config := c.ServiceAccount(t, namespace, "gateway")
	path := c.Kubeconfig(t, config)
	config, err := clientcmd.BuildConfigFromFlags("", path)
	require.NoError(t, err)
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	_, err = client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	require.True(t, apierrors.IsForbidden(err), "%v", err)
	require.ErrorContains(t, err, "system:serviceaccount:"+namespace+":gateway")

	path = c.Kubeconfig(t, c.Admin())
	config, err = clientcmd.BuildConfigFromFlags("", path)
	require.NoError(t, err)
	client, err = kubernetes.NewForConfig(config)
	require.NoError(t, err)
	_, err = client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
}

const crd = `# a comment
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: tunes.example.test
spec:
  group: example.test
  scope: Namespaced
  names: {kind: Tune, plural: tunes}
  versions:
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              properties:
                bars: {type: integer, minimum: 1}
`

func tune(bars string) string {
	return fmt.Sprintf("---\napiVersion: example.test/v1\nkind: Tune\nmetadata: {name: x}\nspec: {bars: %s}\n", bars)
}

func TestApplyUsesADefinitionAtOnceAndItsSchema(t *testing.T) {
	c := kubetest.Shared(t)
	namespace := c.Namespace(t)
	c.Apply(t, c.Admin(), []byte(crd+tune("4")), namespace)
	c.Apply(t, c.Admin(), []byte(crd+tune("8")), namespace) // once more is an update

	err := c.TryApply(t.Context(), c.Admin(), []byte(tune("0")), namespace)
	require.True(t, apierrors.IsInvalid(err), "%v", err)
	require.ErrorContains(t, err, "Tune x")
	require.ErrorContains(t, err, "spec.bars")
	require.ErrorContains(t, c.TryApply(t.Context(), c.Admin(), []byte(tune("4, notes: 1")), namespace), "spec.notes")
	require.ErrorContains(t, c.TryApply(t.Context(), c.Admin(), []byte("kind: [\n"), namespace), "yaml")
	require.ErrorContains(
		t, c.TryApply(t.Context(), c.Admin(), []byte("apiVersion: v1\nkind: Nothing\nmetadata: {name: x}\n"),
			namespace), "Nothing",
	)
}

func TestControllersMakeTheSlicesOfServicesAndFlagsReachTheServer(t *testing.T) {
	t.Parallel()
	c := kubetest.Start(t, kubetest.WithControllers(), kubetest.WithAPIServerFlags("--min-request-timeout=1"))
	namespace := c.Namespace(t)
	c.Apply(
		t, c.Admin(), []byte("apiVersion: v1\nkind: Service\nmetadata: {name: prefill}\nspec: {selector: {role: "+
			"prefill}, ports: [{port: 8100}]}"), namespace,
	)
	c.Node(t, "node-b", "zone-b")
	c.CreatePod(t, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "prefill-0",
			Labels: map[string]string{"role": "prefill"}},
		Spec: corev1.PodSpec{NodeName: "node-b",
			Containers: []corev1.Container{{Name: "engine", Image: "engine"}}},
	})
	c.SetPod(t, namespace, "prefill-0", "10.77.0.11", true)
	require.Eventually(t, func() bool {
		slices, err := c.Client().DiscoveryV1().EndpointSlices(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(slices.Items) != 1 || len(slices.Items[0].Endpoints) != 1 {
			return false
		}
		e := slices.Items[0].Endpoints[0]
		return e.Addresses[0] == "10.77.0.11" && *e.Conditions.Ready && *e.Zone == "zone-b" && *e.NodeName == "node-b"
	}, time.Minute, 20*time.Millisecond)

	events := watchPods(t, c, namespace, "") // would stay for at least half an hour
	next(t, events, watch.Added)
	_, open := <-events
	require.False(t, open)
}

func TestServersAndTheirFilesGoWithTheTest(t *testing.T) {
	t.Parallel()
	var kubeconfig string
	var client *kubernetes.Clientset
	t.Run("inner", func(t *testing.T) {
		c := kubetest.Start(t)
		kubeconfig, client = c.Kubeconfig(t, c.Admin()), c.Client()
		require.FileExists(t, kubeconfig)
	})
	if client == nil {
		t.Skip("without the servers, as the test inside has said")
	}
	_, err := os.Stat(filepath.Dir(kubeconfig))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

// TestKilledTestLeavesNoServer: the runner's timeout, and who presses Ctrl-C, kill a test before it can clean up.
func TestKilledTestLeavesNoServer(t *testing.T) {
	if os.Getenv("KUBETEST_VICTIM") != "" {
		fmt.Println("at", kubetest.Shared(t).Admin().Host)
		time.Sleep(time.Minute) // it is killed before
	}
	if runtime.GOOS != "linux" {
		t.Skip("only Linux ends processes with their parents")
	}
	t.Parallel()
	kubetest.Shared(t) // or skip
	self, err := os.Executable()
	require.NoError(t, err)
	victim := exec.Command(self, "-test.run=^TestKilledTestLeavesNoServer$")
	victim.Env = append(os.Environ(), "KUBETEST_VICTIM=1", "TMPDIR="+t.TempDir())
	out, err := victim.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, victim.Start())
	lines := bufio.NewScanner(out)
	host := ""
	for host == "" && lines.Scan() {
		_, host, _ = strings.Cut(lines.Text(), "at https://")
	}
	assert.NoError(t, victim.Process.Kill())
	assert.Error(t, victim.Wait())
	require.NotEmpty(t, host)
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", host)
		if err == nil {
			conn.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	}, time.Minute, 10*time.Millisecond)
}

// watchPods returns the pods' events since a version ("" for those that are there, too), until the server ends the
// watch. A watch that says nothing for a minute is ended, too.
func watchPods(t *testing.T, c *kubetest.Cluster, namespace, version string) <-chan watch.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	watcher, err := c.Client().CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{ResourceVersion: version})
	require.NoError(t, err)
	t.Cleanup(watcher.Stop)
	t.Cleanup(func() {
		assert.NotErrorIs(t, ctx.Err(), context.DeadlineExceeded, "a watch has been waited for in vain")
	})
	return watcher.ResultChan()
}

// next returns the pod of the next event, which must be of the kind.
func next(t *testing.T, events <-chan watch.Event, kind watch.EventType) *corev1.Pod {
	t.Helper()
	event := <-events
	require.Equal(t, kind, event.Type)
	pod, ok := event.Object.(*corev1.Pod)
	require.True(t, ok)
	return pod
}

func ready(pod *corev1.Pod) corev1.ConditionStatus {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status
		}
	}
	return ""
}
