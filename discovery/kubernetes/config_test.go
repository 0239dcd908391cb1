// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const kubeconfig = `
apiVersion: v1
kind: Config
current-context: east
clusters:
- {name: east, cluster: {server: "https://east.example:6443", certificate-authority: ca.crt}}
- {name: west, cluster: {server: "https://west.example:6443"}}
users:
- {name: me, user: {token: secret}}
contexts:
- {name: east, context: {cluster: east, user: me, namespace: other}}
- {name: west, context: {cluster: west, user: me}}
`

func writeKubeconfig(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

func TestConfigIsTheCurrentContextOfTheFile(t *testing.T) {
	path := writeKubeconfig(t, kubeconfig)
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "ca.crt"), nil, 0o600))
	config, err := Config(path)
	require.NoError(t, err)
	assert.Equal(t, "https://east.example:6443", config.Host)
	assert.Equal(t, "secret", config.BearerToken)
	assert.Equal(t, filepath.Join(filepath.Dir(path), "ca.crt"), config.CAFile, "relative to the file")
}

func TestConfigLooksNowhereElse(t *testing.T) {
	t.Setenv("KUBECONFIG", writeKubeconfig(t, kubeconfig))
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err := Config("")
	require.EqualError(t, err, "kubernetes: this is no pod of a cluster: want the path of a kubeconfig file")

	t.Setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	for content, want := range map[string]string{
		"":                         "kubernetes: the kubeconfig file has no current context",
		"current-context: east\n":  "kubernetes: the kubeconfig file has no current context",
		"contexts: [{name: secret": "kubernetes: the kubeconfig file cannot be read: not what was expected in it",
		"current-context: a\ncontexts: [{name: a, context: {cluster: secret, user: u}}]\n": "kubernetes: the " +
			"kubeconfig file's current context is not usable: want a cluster with a server, a user, and the files " +
			"that they name",
	} {
		_, err := Config(writeKubeconfig(t, content))
		assert.EqualError(t, err, want)
	}
	_, err = Config(filepath.Join(t.TempDir(), "secret"))
	assert.EqualError(t, err, "kubernetes: the kubeconfig file cannot be read: no such file or directory")
}
