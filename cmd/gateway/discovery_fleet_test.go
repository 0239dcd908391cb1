// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// nameServer answers for SRV records of engines on this machine.
type nameServer struct {
	addr  string
	mu    sync.Mutex
	ports map[string][]string // by name
}

func newNameServer(t *testing.T) *nameServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	n := &nameServer{addr: conn.LocalAddr().String(), ports: map[string][]string{}}
	started, done := make(chan struct{}), make(chan error)
	server := &wire.Server{PacketConn: conn, Handler: n, NotifyStartedFunc: func() { close(started) }}
	go func() { done <- server.ActivateAndServe() }()
	<-started
	t.Cleanup(func() {
		_ = server.Shutdown()
		<-done
	})
	return n
}

func (n *nameServer) set(t *testing.T, name string, engines ...*enginesim.Engine) {
	t.Helper()
	var ports []string
	for _, e := range engines {
		u, err := url.Parse(e.URL())
		require.NoError(t, err)
		ports = append(ports, u.Port())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ports[name] = ports
}

// ServeDNS says of a name without engines that it does not exist.
func (n *nameServer) ServeDNS(w wire.ResponseWriter, q *wire.Msg) {
	m, ask := new(wire.Msg).SetReply(q), q.Question[0]
	n.mu.Lock()
	ports := n.ports[strings.TrimSuffix(ask.Name, ".")]
	n.mu.Unlock()
	switch {
	case ask.Name == "host.test." && ask.Qtype == wire.TypeA:
		rr, _ := wire.NewRR("host.test. 1 IN A 127.0.0.1")
		m.Answer = append(m.Answer, rr)
	case ask.Name != "host.test." && len(ports) == 0:
		m.Rcode = wire.RcodeNameError
	case ask.Qtype == wire.TypeSRV:
		for _, port := range ports {
			rr, _ := wire.NewRR(ask.Name + " 1 IN SRV 0 0 " + port + " host.test.")
			m.Answer = append(m.Answer, rr)
		}
	}
	_ = w.WriteMsg(m)
}

// fleet is a gateway of several models, each of another connector and with engines that are found in another way.
type fleet struct {
	*program
	alone *enginesim.Engine
	teams map[string]*team // by model
}

// team is one model's engines, and how they are lost and found again.
type team struct {
	p, d       *enginesim.Engine
	yaml       string
	lose, find func(t *testing.T, f *fleet)
}

func newTeam(t *testing.T, model, connector string, extra map[string]string) *team {
	t.Helper()
	config := enginesim.Config{Model: model, Connector: connector, Extra: extra}
	if connector == "sharedstorage" {
		config.KVRole = enginesim.RoleBoth
	}
	decode := config // whose ports are its own, also while it is down
	decode.Listen, decode.SideChannel = "127.0.0.1:"+unusedPort(t), "127.0.0.1:"+unusedPort(t)
	p, d := simPair(t, config, decode)
	return &team{p: p, d: d}
}

// newFleet starts four pairs: NIXL found in a file, the shared folder by DNS, P2pNccl by registration, SGLang as
// listed.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{teams: map[string]*team{}}
	file := newTeam(t, "by-file", "nixl", nil)
	path := filepath.Join(t.TempDir(), "engines.yaml")
	p, d := as("prefill", file.p), as("decode", file.d)
	lists(t, path, listYAML(p, d))
	file.yaml = serverYAML("by-file", "  kvConnector: {type: nixl}\n  discovery: {file: {path: "+path+"}}\n")
	file.lose = func(t *testing.T, _ *fleet) { lists(t, path, listYAML(p)) }
	file.find = func(t *testing.T, _ *fleet) { lists(t, path, listYAML(p, d)) }
	f.teams["by-file"] = file

	names := newNameServer(t)
	dns := newTeam(t, "by-dns", "sharedstorage", map[string]string{"shared_storage_path": t.TempDir()})
	dns.yaml = serverYAML("by-dns", "  kvConnector: {type: sharedstorage}\n  discovery: {dns: {prefill: prefill.test, "+
		"decode: decode.test, resolver: \""+names.addr+"\"}}\n")
	dns.lose = func(t *testing.T, _ *fleet) { names.set(t, "decode.test") }
	dns.find = func(t *testing.T, _ *fleet) { names.set(t, "prefill.test", dns.p); names.set(t, "decode.test", dns.d) }
	dns.find(t, f)
	f.teams["by-dns"] = dns

	announced := newTeam(t, "by-registration", "p2pnccl",
		map[string]string{"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"})
	announced.yaml = announcing("by-registration", "p2pnccl", "http: 127.0.0.1:0")
	announced.lose = func(t *testing.T, f *fleet) {
		status, _, response := do(t, http.MethodDelete, f.api()+"/decode", "")
		require.Equal(t, http.StatusNoContent, status, response)
	}
	announced.find = func(t *testing.T, f *fleet) {
		for role, e := range map[string]*enginesim.Engine{"prefill": announced.p, "decode": announced.d} {
			require.Less(t, f.register(role, e.URL(), role, attributes{"zmqAddress": e.SideChannel()}), 300)
		}
	}
	f.teams["by-registration"] = announced

	listed := newTeam(t, "by-list", "sglang", nil)
	boot, _ := bootstrapPort(listed.p, listed.d)
	listed.yaml = serverYAML("by-list", "  kvConnector: {type: sglang}\n", entry(listed.p.URL(), "prefill", boot),
		as("decode", listed.d))
	listed.lose = func(t *testing.T, f *fleet) { // a request finds nobody, and the probes notice it
		listed.d.Kill()
		status, _, response := f.complete(`{"model":"by-list","prompt":"x"}`)
		assert.Contains(t, []int{http.StatusBadGateway, http.StatusServiceUnavailable}, status, response)
	}
	listed.find = func(t *testing.T, _ *fleet) { require.NoError(t, listed.d.Restart()) }
	f.teams["by-list"] = listed

	yaml := gatewayYAML("")
	for _, team := range f.teams {
		yaml += team.yaml
	}
	f.program = start(t, yaml)
	announced.find(t, f)
	f.alone = newSim(t, enginesim.Config{})
	return f
}

// readiness asks for it until the models that are not ready are exactly those named.
func (f *fleet) notReady(t *testing.T, want ...string) {
	t.Helper()
	reasons := map[string]string{}
	eventually(t, func() bool {
		status, response := f.ready()
		var r readiness
		require.NoError(t, json.Unmarshal([]byte(response), &r))
		clear(reasons)
		for _, m := range r.Models {
			if !m.Ready {
				reasons[m.Model] = m.Reason
			}
		}
		require.Len(t, r.Models, len(f.teams))
		require.Equal(t, len(reasons) == 0, status == http.StatusOK)
		ok := len(reasons) == len(want)
		for _, model := range want {
			ok = ok && reasons[model] != ""
		}
		return ok
	}, "want %v; not ready: %v", want, reasons)
	for _, model := range want {
		assert.Contains(t, reasons[model], "decode", "the reason says what is missing")
	}
}

// serves sends a model a prompt of its own, and wants the text of one engine alone.
func (f *fleet) serves(t *testing.T, model string, n int) {
	t.Helper()
	prompt := strings.Repeat(fmt.Sprintf("%s %d ", model, n), 40)
	body := fmt.Sprintf(`{"model":%q,"prompt":%q,"max_tokens":8,"temperature":0}`, model, prompt)
	status, h, response := f.complete(body)
	require.Equal(t, http.StatusOK, status, "%s: %s\n%s", model, response, f.log)
	assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"), model)
	_, _, want := do(t, http.MethodPost, f.alone.URL()+"/v1/completions",
		strings.Replace(body, fmt.Sprintf("%q", model), `"tiny"`, 1))
	require.NotEmpty(t, texts(t, want))
	assert.Equal(t, texts(t, want), texts(t, response), model)
}

// One listener serves models of different connectors whose engines are found in different ways; a model that has no
// pair is not ready by name, and costs the others nothing.
func TestAMixedFleetWhoseEnginesAreFoundInFourWays(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.notReady(t)
	n := 0
	all := func(but string) {
		t.Helper()
		for model := range f.teams {
			n++
			if model != but {
				f.serves(t, model, n)
				continue
			}
			status, h, response := f.complete(fmt.Sprintf(`{"model":%q,"prompt":"x"}`, model))
			assert.Equal(t, http.StatusServiceUnavailable, status, response)
			assert.NotEmpty(t, h.Get("Retry-After"))
		}
	}
	all("")
	for model, team := range f.teams {
		team.lose(t, f)
		f.notReady(t, model)
		all(model)
		team.find(t, f)
		f.notReady(t)
		all("")
	}
	for model, team := range f.teams {
		pairOf{p: team.p, d: team.d}.clean(t)
		assert.Positive(t, team.d.Stats().ExternalKVTransfer, "%s: decode computed all prompts itself", model)
		for _, e := range []*enginesim.Engine{team.p, team.d} {
			for _, r := range e.Requests() {
				if r.Method == http.MethodPost {
					assert.Contains(t, string(r.Body), model+" ", "another model's request")
				}
			}
		}
	}
}
