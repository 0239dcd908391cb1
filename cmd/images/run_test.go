// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

// podman is a container engine with a store of its own, in a folder of the test.
type podman []string

// newPodman skips the test, or with CI=true fails it, where install.sh has not been run. As root, since the container
// is to have the user of the image and no namespace of users that would hide it.
func newPodman(t *testing.T) podman {
	t.Helper()
	missing := ""
	for _, name := range []string{"podman", "runc"} {
		if _, err := exec.LookPath(name); err != nil {
			missing = name + " is not installed: run cmd/images/install.sh"
		}
	}
	if os.Geteuid() != 0 {
		missing = "containers are run as root"
	}
	if missing != "" {
		if os.Getenv("CI") == "true" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	dir := t.TempDir()
	return podman{"--root", filepath.Join(dir, "root"), "--runroot", filepath.Join(dir, "run"),
		"--storage-driver", "vfs", "--runtime", "runc", "--cgroup-manager", "cgroupfs"}
}

func (p podman) command(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "podman", append(append([]string{}, p...), args...)...)
}

func (p podman) output(t *testing.T, args ...string) string {
	t.Helper()
	out, err := p.command(t.Context(), args...).CombinedOutput()
	require.NoError(t, err, "podman %s\n%s", strings.Join(args, " "), out)
	return strings.TrimSpace(string(out))
}

// run are the arguments for a container in the host's network, which cannot write to its file system and has no
// rights, as the chart runs the gateway. The limits are lower than podman's own, which not every machine may set.
func (p podman) run(name, image string, args ...string) []string {
	return append([]string{"run", "--rm", "--name", name, "--network", "host", "--read-only", "--cap-drop", "all",
		"--security-opt", "no-new-privileges", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", image},
		args...)
}

// serving is a program that runs in a container.
type serving struct {
	addr string
	log  sharedtest.Log
	cmd  *exec.Cmd
}

var servingLine = regexp.MustCompile(`msg=serving listen=\S*:(\d+)`)

// start runs a container until its program says that it serves.
func (p podman) start(t *testing.T, args []string) *serving {
	t.Helper()
	s := &serving{cmd: p.command(context.WithoutCancel(t.Context()), args...)}
	s.cmd.Stderr = &s.log
	require.NoError(t, s.cmd.Start())
	require.Eventually(t, func() bool { return servingLine.MatchString(s.log.String()) }, time.Minute,
		10*time.Millisecond, "%s", &s.log)
	s.addr = "127.0.0.1:" + servingLine.FindStringSubmatch(s.log.String())[1]
	return s
}

// post sends a streamed request and returns when its response has begun.
func (s *serving) post(t *testing.T, header http.Header) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.addr+"/v1/completions",
		strings.NewReader(`{"model":"tiny","prompt":"the quick brown fox","max_tokens":20,"stream":true}`))
	require.NoError(t, err)
	req.Header = header.Clone()
	req.Header.Set("Content-Type", "application/json")
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	return resp
}

// The images of HEAD run in front of two engines as an unknown user, without a right and without a place to write, and
// at the engine's stop they let streams end.
func TestTheImagesServeAndDrain(t *testing.T) {
	pod := newPodman(t)
	const arch = runtime.GOARCH
	folder := t.TempDir()
	// By the program itself: with the race detector it would compress for minutes.
	_, err := command(t.Context(), "../..", nil, "go", "run", "./cmd/images", "-out", folder, "-arch", arch,
		"-tag", "test")
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = pod.command(context.WithoutCancel(t.Context()), "rm", "--all", "--force", "--time", "0").Run()
	})
	for _, p := range programs {
		name := "pdkit-" + p.name
		pod.output(t, "load", "--quiet", "--input", filepath.Join(folder, name+"-test.tar"))
		pod.output(t, "image", "exists", "docker.io/library/"+name+":test")
	}
	prefill, decode, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{ITL: 100 * time.Millisecond})
	require.NoError(t, err)
	t.Cleanup(func() { _ = prefill.Close(); _ = decode.Close() })
	p, err := url.Parse(prefill.URL())
	require.NoError(t, err)
	d, err := url.Parse(decode.URL())
	require.NoError(t, err)
	config := filepath.Join(t.TempDir(), "gateway.yaml")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `apiVersion: pdkit.dev/v1alpha1
kind: Gateway
spec: {listen: "127.0.0.1:0", admin: "127.0.0.1:0"}
---
apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
spec:
  model: tiny
  kvConnector: {type: nixl}
  discovery: {static: {endpoints: [{url: %q, role: prefill}, {url: %q, role: decode}]}}
`, p, d), 0o644)) // for the container's user

	t.Run("gateway", func(t *testing.T) {
		args := pod.run("gateway", "pdkit-gateway:test", "-config", "/etc/pdkit/gateway.yaml")
		mount := []string{"run", "--volume", config + ":/etc/pdkit/gateway.yaml:ro"}
		pod.drains(t, "gateway", append(mount, args[1:]...), http.Header{})
	})
	t.Run("sidecar", func(t *testing.T) {
		pod.drains(t, "sidecar", pod.run("sidecar", "pdkit-sidecar:test", "--port=0", "--secure-proxy=false",
			"--model-server-port="+d.Port(), "--prefillers="+p.Host), http.Header{"X-Prefiller-Host-Port": {p.Host}})
	})
	t.Run("sidecar by the path of llm-d's", func(t *testing.T) {
		args := pod.run("sidecar", "pdkit-sidecar:test", "-h")
		assert.Contains(t, pod.output(t, append([]string{"run", "--entrypoint", "/app/pd-sidecar"}, args[1:]...)...),
			"model-server-port")
	})
	t.Run("pdctl", func(t *testing.T) {
		assert.Contains(t, pod.output(t, pod.run("pdctl", "pdkit-pdctl:test", "--help")...), "render")
	})
}

// drains starts a container, stops it while a stream runs, and looks at both ends.
func (p podman) drains(t *testing.T, name string, args []string, header http.Header) {
	t.Helper()
	s := p.start(t, args)
	pid := p.output(t, "inspect", "--format", "{{.State.Pid}}", name)
	status, err := os.ReadFile("/proc/" + pid + "/status")
	require.NoError(t, err)
	for _, line := range []string{"Uid:\t65532\t", "Gid:\t65532\t", "NSpid:\t" + pid + "\t1\n",
		"CapEff:\t0000000000000000\n", "NoNewPrivs:\t1\n"} {
		assert.Contains(t, string(status), line)
	}
	root, err := os.ReadFile("/proc/" + pid + "/mountinfo")
	require.NoError(t, err)
	assert.Regexp(t, `(?m)^\S+ \S+ \S+ \S+ / ro,`, string(root))

	resp := s.post(t, header)
	defer resp.Body.Close()
	assert.Equal(t, "disaggregated", resp.Header.Get("X-Pd-Mode"))
	lines := bufio.NewReader(resp.Body)
	_, err = lines.ReadString('\n')
	require.NoError(t, err)
	stopped := make(chan error, 1)
	go func() { stopped <- p.command(t.Context(), "stop", "--time", "30", name).Run() }()
	rest, err := io.ReadAll(lines)
	require.NoError(t, err, "the stream is not cut")
	assert.Contains(t, string(rest), "[DONE]")
	require.NoError(t, <-stopped)
	require.NoError(t, s.cmd.Wait(), "exit code 0 after a drain\n%s", &s.log)
	assert.Contains(t, s.log.String(), "msg=drain") // drained, draining
}
