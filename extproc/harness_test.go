// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/extproc"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// world is a prefill and a decode engine, a flow over them, and a Server at a gRPC server.
type world struct {
	t    *testing.T
	p, d *enginesim.Engine
	flow *pdflow.Flow
	addr string // of the gRPC server
	mu   sync.Mutex
	seen []*pdflow.Outcome
}

func newWorld(t *testing.T, c connector.KVConnector, prefill, decode enginesim.Config, opts ...pdflow.Option) *world {
	t.Helper()
	w := &world{t: t}
	var err error
	w.p, w.d, err = enginesim.Pair(prefill, decode)
	require.NoError(t, err)
	t.Cleanup(func() { _ = w.p.Close(); _ = w.d.Close() })
	attributes := map[string]string{}
	if b := w.p.Bootstrap(); b != "" {
		attributes["bootstrapPort"] = portOf(b)
	}
	w.start(c, w.p.URL(), w.d.URL(), attributes, opts...)
	return w
}

// start makes the flow over two engines, and serves it.
func (w *world) start(c connector.KVConnector, prefill, decode string, attributes map[string]string,
	opts ...pdflow.Option,
) {
	t := w.t
	t.Helper()
	pe, err := discovery.New(prefill, discovery.RolePrefill)
	require.NoError(t, err)
	pe.Attributes = attributes
	de, err := discovery.New(decode, discovery.RoleDecode)
	require.NoError(t, err)
	set, err := static.NewSet(pe, de)
	require.NoError(t, err)
	w.flow, err = pdflow.New(c, pick.New(set, pick.RoundRobin()),
		append(opts, pdflow.WithObserver(pdflow.Observer{SessionEnd: w.SessionEnd}))...)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, w.flow.Shutdown(context.Background()), "every request has been ended") })
	w.serve()
}

// serve registers a Server for the model of every name but "unknown".
func (w *world) serve() {
	send := transport.New(nil)
	s, err := extproc.NewServer(func(model string) *pdflow.Flow {
		if model == "unknown" {
			return nil
		}
		return w.flow
	}, send, &extproc.Options{MaxBody: 6 << 20})
	require.NoError(w.t, err)
	g := grpc.NewServer(grpc.MaxRecvMsgSize(10 << 20))
	extprocv3.RegisterExternalProcessorServer(g, s)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w.t, err)
	w.addr = ln.Addr().String()
	ended := make(chan struct{})
	go func() { defer close(ended); _ = g.Serve(ln) }()
	w.t.Cleanup(func() { g.Stop(); <-ended; _ = send.Close() })
}

func (w *world) SessionEnd(_ context.Context, o *pdflow.Outcome) {
	w.mu.Lock()
	defer w.mu.Unlock()
	same := *o
	w.seen = append(w.seen, &same)
}

func (w *world) outcomes() []*pdflow.Outcome {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]*pdflow.Outcome(nil), w.seen...)
}

// wait waits until n attempts have ended and returns the codes of their errors.
func (w *world) wait(n int) (codes []pdflow.Code) {
	w.t.Helper()
	ended := func() bool { return len(w.outcomes()) >= n && len(w.flow.Sessions()) == 0 }
	require.Eventually(w.t, ended, 20*time.Second, 5*time.Millisecond)
	for _, o := range w.outcomes() {
		code := pdflow.Code("")
		if o.Err != nil {
			code = o.Err.Code
		}
		codes = append(codes, code)
	}
	return codes
}

// envoy starts a real Envoy before the world's server and returns its base URL. Each change is a text of
// testdata/envoy.yaml and what stands in its place.
func (w *world) envoy(changes ...string) string {
	t := w.t
	t.Helper()
	binary, err := filepath.Abs("../.tools/envoy/envoy")
	require.NoError(t, err)
	if _, err := os.Stat(binary); err != nil {
		if os.Getenv("CI") == "true" {
			require.NoError(t, err, "extproc/testdata/install.sh has not been run")
		}
		t.Skip("Envoy is not installed: run extproc/testdata/install.sh")
	}
	config, err := os.ReadFile("testdata/envoy.yaml")
	require.NoError(t, err)
	changes = append([]string{"port_value: 9002", "port_value: " + portOf(w.addr), "41943040", "8388608"}, changes...)
	for i := 0; i < len(changes); i += 2 {
		require.Contains(t, string(config), changes[i])
		config = []byte(strings.ReplaceAll(string(config), changes[i], changes[i+1]))
	}
	require.Contains(t, string(config), "port_value: 10000")
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	for range 5 { // another program can take the port before Envoy does
		port, err := freeport.One()
		require.NoError(t, err)
		addr := "127.0.0.1:" + port
		at := strings.ReplaceAll(string(config), "port_value: 10000", "port_value: "+portOf(addr))
		if listens(t, binary, addr, at) {
			return "http://" + addr
		}
	}
	require.Fail(t, "Envoy does not listen")
	return ""
}

// listens starts Envoy, and reports whether it listens at an address. If not, it has ended.
func listens(t *testing.T, binary, addr, config string) bool {
	t.Helper()
	dir := t.TempDir()
	file, log := filepath.Join(dir, "envoy.yaml"), filepath.Join(dir, "log")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	args := []string{"-c", file, "--concurrency", "1", "--disable-hot-restart", "--log-path", log,
		"--file-flush-interval-msec", "20"}
	if level := os.Getenv("ENVOY_LOG"); level != "" {
		args = append(args, "--component-log-level", level)
	}
	process := exec.Command(binary, args...)
	require.NoError(t, process.Start())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = process.Wait() }()
	logged := func() string { text, _ := os.ReadFile(log); return string(text) }
	t.Cleanup(func() {
		_ = process.Process.Kill() // it may have ended
		<-ended
		if t.Failed() || os.Getenv("ENVOY_LOG") != "" {
			t.Log(logged())
		}
	})
	for deadline := time.After(time.Minute); ; {
		select {
		case <-ended:
			return false
		case <-deadline:
			require.Fail(t, "Envoy does not listen")
		case <-time.After(20 * time.Millisecond):
		}
		if c, err := net.Dial("tcp", addr); err == nil && c.Close() == nil &&
			strings.Contains(logged(), "starting workers") { // else another program listens there
			return true
		}
	}
}

func portOf(addr string) string { return addr[strings.LastIndex(addr, ":")+1:] }
