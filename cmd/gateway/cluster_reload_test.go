// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A reload of the file beside the objects of a cluster: the file's model goes first, and the object's comes back with
// the file's end, and no request fails meanwhile.
func TestTheFileGoesBeforeTheCluster(t *testing.T) {
	n := newNamespace(t)
	p, d := newEngine(t), newEngine(t)
	cluster := gatewayYAML(fmt.Sprintf(", modelServers: {kubeconfig: %q, namespace: %s}", n.kubeconfig, n.name))
	g := start(t, cluster)
	n.engines("nixl", "m", "a", map[string]string{"app": "m"})
	n.modelServer("m", `{model: m, kvConnector: {type: nixl}`+selecting+`}`)
	n.becomes(g, "m", http.StatusOK)
	tr := send(t, g.client+"/v1/completions", func(int64) string { return completionOf("m") }, 200)
	g.configure(cluster + pairYAML("m", p, d, ""))
	n.logged(g, "not served as it is.*spec.model is served by the configuration file already")
	n.logged(g, "ModelServer is served.*configuration file.*connector=http")
	g.configure(cluster)
	n.logged(g, "a ModelServer ends.*configuration file")
	assert.Empty(t, tr.end(), "of %d requests; %s", tr.sent.Load(), g.log)
	assert.Positive(t, tr.sent.Load())
	debug := g.page("/debug/pd")
	assert.NotContains(t, debug, `"rejected"`)
	assert.Contains(t, debug, `"nixl"`)
}
