// SPDX-License-Identifier: Apache-2.0

package kubetest_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

func TestPod(t *testing.T) {
	c := kubetest.Shared(t)
	ns := c.Namespace(t)
	c.Pod(t, ns, "a", map[string]string{"role": "prefill"}, nil)
	c.SetPod(t, ns, "a", "127.0.0.11", true)
	_ = time.Now
	_ = watch.Added
	_ = metav1.ListOptions{}
	_ = apierrors.IsGone
	require.NotEmpty(t, ns)
}
