// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// foundYAML is a ModelServer whose engines are found in the given way.
func foundYAML(discovery string) string {
	return gatewayYAML("") + "apiVersion: networking.matrixinfer.ai/v1alpha1\nkind: ModelServer\nspec: {model: m, " +
		"discovery: {" + discovery + "}}\n"
}

// lists writes a list of engines as a file, by renaming.
func lists(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path+".new", []byte(text), 0o600))
	require.NoError(t, os.Rename(path+".new", path))
}

func pairList(p, d *engine) string {
	return fmt.Sprintf("endpoints:\n- {url: %q, role: prefill}\n- {url: %q, role: decode}\n", p.URL, d.URL)
}

// reaches sends requests until both engines have got some.
func reaches(t *testing.T, g *program, p, d *engine) {
	t.Helper()
	beforeP, beforeD := p.count(), d.count()
	require.Eventually(t, func() bool {
		status, _, _ := do(t, http.MethodPost, g.client+"/v1/completions", completion)
		return status == http.StatusOK && p.count() > beforeP && d.count() > beforeD
	}, 30*time.Second, 10*time.Millisecond, "%s", g.log)
}

// knows waits until so many engines of the first model are known: a request waits only a moment for that.
func (p *program) knows(engines int) {
	p.t.Helper()
	require.Eventually(p.t, func() bool { return len(p.debug().Models[0].Endpoints) == engines }, 20*time.Second,
		time.Millisecond, "%s", p.log)
}

func TestEnginesAreFoundInAFile(t *testing.T) {
	p, d, d2 := newEngine(t), newEngine(t), newEngine(t)
	path := filepath.Join(t.TempDir(), "engines.yaml")
	g := start(t, foundYAML("file: {path: "+path+"}"))
	status, h, _ := do(t, http.MethodPost, g.client+"/v1/completions", completion)
	assert.Equal(t, http.StatusServiceUnavailable, status, "there is no list yet")
	assert.NotEmpty(t, h.Get("Retry-After"))
	require.Eventually(t, func() bool {
		return strings.Contains(g.log.String(), "cannot be read: no such file or directory (there is no list yet)")
	}, 20*time.Second, time.Millisecond)

	lists(t, path, pairList(p, d))
	reaches(t, g, p, d)
	lists(t, path, pairList(p, d2))
	reaches(t, g, p, d2)

	lists(t, path, pairList(p, d)+"- {url: hunter2, rol: prefill}\n")
	require.Eventually(t, func() bool {
		return strings.Contains(g.log.String(), "line 4: endpoints[2].rol: unknown field")
	}, 30*time.Second, time.Millisecond)
	assert.NotContains(t, g.log.String(), "hunter2")
	reaches(t, g, p, d2)
}

// A relative path starts at the configuration's folder, wherever the program was started.
func TestTheFilesPathStartsAtTheConfiguration(t *testing.T) {
	dir := t.TempDir()
	p, d := newEngine(t), newEngine(t)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "lists"), 0o700))
	lists(t, filepath.Join(dir, "lists", "engines.yaml"), pairList(p, d))
	file := filepath.Join(dir, "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte(foundYAML("file: {path: lists/engines.yaml}")), 0o600))
	code, stdout, stderr := check(t, "-config", file)
	assert.Equal(t, exitOK, code, stderr)
	assert.Contains(t, stdout, "discovery       file lists/engines.yaml, 2 endpoints now\n    prefill       "+p.URL)
}

func TestEnginesAreFoundByName(t *testing.T) {
	t.Parallel()
	p, d, d2 := newEngine(t), newEngine(t), newEngine(t)
	var decode atomic.Pointer[engine]
	decode.Store(d)
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	started, done := make(chan struct{}), make(chan error)
	server := &wire.Server{PacketConn: conn, NotifyStartedFunc: func() { close(started) }}
	server.Handler = wire.HandlerFunc(func(w wire.ResponseWriter, q *wire.Msg) {
		m := new(wire.Msg).SetReply(q)
		at := map[string]*engine{"prefill.test.": p, "decode.test.": decode.Load()}[q.Question[0].Name]
		switch ask := q.Question[0]; {
		case ask.Qtype == wire.TypeSRV && at != nil:
			u, _ := url.Parse(at.URL)
			rr, _ := wire.NewRR(ask.Name + " 1 IN SRV 0 0 " + u.Port() + " e.test.")
			m.Answer = append(m.Answer, rr)
		case ask.Qtype == wire.TypeA:
			rr, _ := wire.NewRR(ask.Name + " 1 IN A 127.0.0.1")
			m.Answer = append(m.Answer, rr)
		}
		_ = w.WriteMsg(m)
	})
	go func() { done <- server.ActivateAndServe() }()
	<-started
	t.Cleanup(func() {
		_ = server.Shutdown()
		<-done
	})

	g := start(
		t, foundYAML(fmt.Sprintf("dns: {prefill: prefill.test, decode: decode.test, resolver: %q}", conn.LocalAddr())),
	)
	reaches(t, g, p, d)
	decode.Store(d2)
	reaches(t, g, p, d2)
}
