// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
)

// lmcachePD is a sender of LMCache's transfer, which ends by a request without disagg_spec, and a receiver.
func lmcachePD(t *testing.T) (p, d *enginesim.Engine, port string, receiver attributes) {
	t.Helper()
	c := &protocol{}
	notices(nil, "")(t, c)
	port = c.prefill.Extra["pd_proxy_port"]
	c.prefill.Connector, c.decode.Connector = "lmcache-pd", "lmcache-pd"
	p, d = simPair(t, c.prefill, c.decode)
	_, receiver = receivers(p, d)
	return p, d, port, receiver
}

// listIn finds engines in a file: with a static list that has a fault the gateway does not start.
func listIn(t *testing.T, engines ...string) string {
	t.Helper()
	list := filepath.Join(t.TempDir(), "endpoints.yaml")
	lists(t, list, listYAML(engines...))
	return "  discovery: {file: {path: " + strconv.Quote(list) + "}}\n"
}

// Each way on which a gateway may send a request that computes tokens to an engine, and none that ends a sender.
func TestNothingWithoutDisaggSpecReachesASender(t *testing.T) {
	t.Parallel()
	const several = `{"model":"tiny","prompt":["one","two"],"max_tokens":2}`
	for name, c := range map[string]struct {
		role   string // that the list gives P
		runs   string // P's attribute connector
		spec   string // beside kvConnector; the connector is lmcache-pd, unless other is given
		other  string
		bare   bool // the list has no ports of D
		body   string
		status int
	}{
		"disaggregated":              {role: "prefill", status: 200},
		"aggregated":                 {role: "prefill", body: several, status: 200},
		"aggregated, role both":      {role: "both", body: several, status: 200},
		"disaggregated, role both":   {role: "both", status: 503},
		"fallback, role both":        {role: "both", spec: ", fallback: decode", status: 200},
		"fallback to another, told":  {role: "prefill", runs: "lmcache-pd", spec: toHTTP, bare: true, status: 503},
		"fallback to another":        {role: "prefill", spec: toHTTP, bare: true, status: 503},
		"fallback to another, both":  {role: "both", spec: toHTTP, bare: true, status: 503},
		"http before PD engines":     {role: "prefill", other: "http", status: 503},
		"http before a told engine":  {role: "prefill", other: "http", runs: "lmcache-pd", bare: true, status: 503},
		"lmcache before PD engines":  {role: "prefill", other: "lmcache", status: 503},
		"lmcache before a told one":  {role: "prefill", other: "lmcache", runs: "lmcache-pd", bare: true, status: 503},
		"nixl before a told engine":  {role: "prefill", other: "nixl", runs: "lmcache-pd", bare: true, status: 503},
		"store before PD, aggregate": {role: "prefill", other: "lmcache", body: several, status: 200},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, d, port, receiver := lmcachePD(t)
			if c.bare {
				receiver = nil
			}
			runs := attributes{}
			if c.runs != "" {
				runs["connector"] = c.runs
			}
			typ := c.other
			if typ == "" {
				typ = `lmcache-pd, config: {notifyListen: "127.0.0.1:` + port + `", notifyTimeout: 20s}`
			}
			g := start(t, gatewayYAML(passing)+serverYAML("tiny", "  kvConnector: {type: "+typ+c.spec+"}\n"+
				listIn(t, entry(p.URL(), c.role, runs), entry(d.URL(), "decode", receiver))))
			g.knows(2)
			for n := range 3 { // round robin
				text := c.body
				if text == "" {
					text = body(connector.APICompletions, n, false)
				}
				status, _, got := do(t, http.MethodPost, g.client+connector.APICompletions.Path(), text)
				assert.Equal(t, c.status, status, got)
			}
			status, _, _ := do(t, http.MethodGet, p.URL()+"/health", "")
			assert.Equal(t, http.StatusOK, status, "the prefill engine has ended")
		})
	}
}

// Embeddings and similar requests go only to engines of role decode, even if engines of role both are there.
func TestNoSenderGetsWhatPasses(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	g := start(t, gatewayYAML(passing)+serverYAML("m", "  kvConnector: {type: lmcache-pd, config: {notifyListen: "+
		"\"127.0.0.1:"+unusedPort(t)+"\"}}\n"+listIn(t, entry(p.URL, "both", nil),
		entry(d.URL, "decode", attributes{"receiverInitPorts": "1", "receiverAllocPorts": "2"}))))
	g.knows(2)
	for range 4 {
		status, _, got := do(t, http.MethodPost, g.client+"/v1/embeddings", `{"model":"m","input":"x"}`)
		assert.Equal(t, http.StatusOK, status, got)
	}
	assert.Zero(t, p.count())
	assert.Equal(t, 4, d.count())
}

const toHTTP = ", fallback: connector, fallbackConnector: {type: http}"

// What a static list tells is found before the first request.
func TestCheckFindsConnectorsThatWouldEndASender(t *testing.T) {
	const ports = "{receiverInitPorts: \"1\", receiverAllocPorts: \"2\"}"
	for name, c := range map[string]struct{ connector, prefill, decode, found string }{
		"lmcache before a receiver": {"{type: lmcache}", "{url: \"http://p:1\", role: prefill}",
			"{url: \"http://d:1\", role: decode, attributes: " + ports + "}",
			"attributes.receiverInitPorts: is a receiver's"},
		"lmcache before a receiver with the class of both": {"{type: lmcache}", "{url: \"http://p:1\", role: prefill}",
			"{url: \"http://d:1\", role: decode, " +
				"attributes: {connector: LMCacheConnectorV1, receiverInitPorts: \"1\"}}",
			"attributes.receiverInitPorts: is a receiver's"},
		"http before a receiver": {"{type: http}", "{url: \"http://p:1\", role: prefill}",
			"{url: \"http://d:1\", role: decode, attributes: " + ports + "}",
			"attributes.receiverInitPorts: is a receiver's"},
		"lmcache before a sender": {"{type: LMCacheConnectorV1}",
			"{url: \"http://p:1\", role: prefill, attributes: {connector: lmcache-pd}}",
			"{url: \"http://d:1\", role: decode}", "attributes.connector: is lmcache-pd"},
		"an engine of both roles": {"{type: lmcache-pd}",
			"{url: \"http://p:1\", role: both, attributes: " + ports + "}",
			"{url: \"http://d:1\", role: decode, attributes: " + ports + "}", "endpoints[0].role: is both"},
		"a fallback of another": {"{type: lmcache-pd" + toHTTP + "}", "{url: \"http://p:1\", role: prefill}",
			"{url: \"http://d:1\", role: decode, attributes: " + ports + "}",
			"endpoints[0].attributes.connector: is missing"},
		"a fallback that is told apart": {"{type: lmcache-pd" + toHTTP + "}",
			"{url: \"http://p:1\", role: prefill, attributes: {connector: lmcache-pd}}",
			"{url: \"http://d:1\", role: decode, attributes: {connector: lmcache-pd, receiverInitPorts: \"1\", " +
				"receiverAllocPorts: \"2\"}}", ""},
		"both in one process, synchronous": {"{type: lmcache-pd, config: {pd_backend_mode: sync}}",
			"{url: \"http://p:1\", role: both, attributes: " + ports + "}",
			"{url: \"http://d:1\", role: decode, attributes: " + ports + "}", ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := check(t, "-config",
				write(t, serverYAML("m", "  kvConnector: "+c.connector+"\n", c.prefill, c.decode)))
			if c.found == "" {
				assert.Equal(t, exitOK, code, stderr)
				return
			}
			assert.Equal(t, exitWrong, code)
			assert.Contains(t, stderr, c.found)
		})
	}
}
