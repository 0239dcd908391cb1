// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"testing"

	"github.com/pdkit/pdkit/discovery/kubernetes/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }
