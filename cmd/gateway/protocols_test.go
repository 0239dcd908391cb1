// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// protocols is the table of all connectors' cases; those of one family of protocols stand in a file of their own.
var protocols = slices.Concat(nixlProtocols(), nixlPushProtocols(), mooncakeProtocols(), ascendProtocols(),
	lmcacheProtocols(), storesProtocols(), sglangProtocols(), relayProtocols(), hybridProtocols())

// vLLM's own APIs, which these protocols carry all.
var vllmAPIs = []connector.API{connector.APIChat, connector.APIResponses, connector.APIMessages, connector.APIGenerate}

// loneD and loneP are pairs of which one engine has no connector.
var (
	loneD = broken{func(_ *testing.T, c *protocol) { c.decode.Connector = "none" }, reuse.NotReused,
		"never asked its KV connector"}
	loneP = broken{func(_ *testing.T, c *protocol) { c.prefill.Connector = "none" }, reuse.Failed,
		"no usable KV handoff"}
)

// protocol is a connector and engines that speak its protocol.
type protocol struct {
	name      string // of the case, where a connector has several
	connector string // kvConnector.type
	config    string // of the connector, as one line of YAML: {leaseDuration: 30s}
	spec      string // further lines of the ModelServer's spec, as pairYAML takes them
	prefill   enginesim.Config
	decode    enginesim.Config
	// fills in what only the test knows: folders, free ports
	prepare    func(t *testing.T, c *protocol)
	attributes func(p, d *enginesim.Engine) (prefill, decode attributes) // of the endpoints
	// besides completions, those that the protocol carries; nil: chat
	apis []connector.API
	// an engine of its own gives the texts to compare with, since the pair's serve none alone
	alone bool
	// broken changes a good case so that no KV moves: what verify must find out, and words that its reasons must hold.
	broken map[string]broken
}

type broken struct {
	change  func(t *testing.T, c *protocol)
	verdict reuse.Verdict
	reason  string
}

func (c *protocol) title() string {
	if c.name != "" {
		return c.connector + "/" + c.name
	}
	return c.connector
}

// pairOf is a case at work: its engines, and a gateway in front of them.
type pairOf struct {
	p, d, alone *enginesim.Engine
	gateway     *program
}

func (c *protocol) start(t *testing.T) pairOf {
	t.Helper()
	if c.prepare != nil {
		c.prepare(t, c)
	}
	for _, side := range []*enginesim.Config{&c.prefill, &c.decode} {
		if side.Connector == "" {
			side.Connector = c.connector
		}
	}
	var x pairOf
	x.p, x.d = simPair(t, c.prefill, c.decode)
	var alone enginesim.Config
	if c.connector == "sglang" {
		alone.Connector = c.connector // its API and its count of a limit are SGLang's own
	}
	x.alone = newSim(t, alone)
	var pa, da attributes
	if c.attributes != nil {
		pa, da = c.attributes(x.p, x.d)
	}
	x.gateway = start(t, gatewayYAML("")+serverYAML("tiny", fmt.Sprintf("  kvConnector: {type: %s, config: %s, retry: "+
		"{maxAttempts: 1}, timeouts: {prefill: 20s, decode: 20s}}\n%s", c.connector, cmp.Or(c.config, "{}"), c.spec),
		entry(x.p.URL(), "prefill", pa), entry(x.d.URL(), "decode", da)))
	return x
}

// body is a request that no engine has seen.
func body(api connector.API, n int, stream bool) string {
	prompt := strings.Repeat(fmt.Sprintf("%d prompts of %s. ", n, api), 40)
	member := map[connector.API]string{
		connector.APICompletions: `"prompt":%q`, connector.APIChat: `"messages":[{"role":"user","content":%q}]`,
		connector.APIResponses: `"input":%q`, connector.APIMessages: `"messages":[{"role":"user","content":%q}]`,
		connector.APISGLang: `"text":%q`,
	}
	switch api {
	case connector.APIGenerate:
		ids := make([]string, len(prompt))
		for i := range ids {
			ids[i] = fmt.Sprint(prompt[i])
		}
		return fmt.Sprintf(`{"model":"tiny","token_ids":[%s],"sampling_params":{"max_tokens":12,"temperature":0},`+
			`"stream":%t}`, strings.Join(ids, ","), stream)
	case connector.APISGLang:
		return fmt.Sprintf(`{`+member[api]+`,"sampling_params":{"max_new_tokens":12,"temperature":0},"stream":%t}`,
			prompt, stream)
	case connector.APIResponses:
		return fmt.Sprintf(`{"model":"tiny",`+member[api]+`,"max_output_tokens":12,"temperature":0,"stream":%t}`,
			prompt, stream)
	}
	return fmt.Sprintf(`{"model":"tiny",`+member[api]+`,"max_tokens":12,"temperature":0,"stream":%t}`, prompt, stream)
}

// texts joins all text that a response of any API holds, whole or streamed.
func texts(t *testing.T, response string) string {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(response) {
		line = strings.TrimSpace(line)
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			line = data
		}
		if !strings.HasPrefix(line, "{") {
			continue
		}
		var event map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &event), line)
		collect(&b, event)
	}
	return b.String()
}

// collect finds the text of one event or response, by the members in which the APIs keep it.
func collect(b *strings.Builder, v map[string]any) {
	if kind, _ := v["type"].(string); strings.HasPrefix(kind, "response.") && kind != "response.output_text.delta" {
		return // events of the Responses API that repeat what deltas have told
	}
	for _, key := range []string{"choices", "output", "content"} {
		list, _ := v[key].([]any)
		for _, item := range list {
			if m, ok := item.(map[string]any); ok {
				collect(b, m)
			}
		}
	}
	for _, key := range []string{"message", "delta"} {
		if m, ok := v[key].(map[string]any); ok {
			collect(b, m)
		}
	}
	for _, key := range []string{"text", "content", "delta"} {
		if s, ok := v[key].(string); ok {
			b.WriteString(s)
		}
	}
	if ids, ok := v["token_ids"].([]any); ok && v["text"] == nil {
		for _, id := range ids {
			if n, ok := id.(float64); ok {
				b.WriteByte(byte(n))
			}
		}
	}
}

// One request of each API that the protocol carries, streamed and not: the text is that of one engine alone, the client
// sees its own id and no addresses, and no KV was lost, used twice or computed again. verify says so, too.
func TestEachConnectorThroughTheGateway(t *testing.T) {
	t.Parallel()
	for _, c := range protocols {
		t.Run(c.title(), func(t *testing.T) {
			t.Parallel()
			x := c.start(t)
			apis := append([]connector.API{connector.APICompletions}, c.apis...)
			if c.apis == nil {
				apis = append(apis, connector.APIChat)
			}
			n := 0
			for _, api := range apis {
				for _, stream := range []bool{false, true} {
					n++
					request, id := body(api, n, stream), fmt.Sprint("client-", n)
					status, h, response := do(t, http.MethodPost, x.gateway.client+api.Path(), request, "X-Request-Id",
						id)
					require.Equal(t, http.StatusOK, status, "%s: %s\n%s", api, response, x.gateway.log)
					assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"))
					assert.Equal(t, id, h.Get("X-Request-Id"))
					assert.NotContains(t, response, "_addr_", api)
					assert.NotContains(t, response, "127.0.0.1", api)
					if api == connector.APICompletions && (c.connector == "p2pnccl" || c.connector == "moriio") {
						assert.Contains(t, response, "cmpl-"+id, "the legs' own id holds addresses")
					}
					_, _, want := do(t, http.MethodPost, x.alone.URL()+api.Path(), request)
					require.NotEmpty(t, texts(t, response), response)
					assert.Equal(t, texts(t, want), texts(t, response), "%s, stream %t", api, stream)
				}
			}
			x.clean(t)
			assert.Positive(t, x.d.Stats().ExternalKVTransfer, "decode computed all prompts itself")
			assert.Zero(t, x.d.Stats().FailedTransfers)
			r := x.verify(t, &c)
			assert.Equal(t, reuse.Reused, r.Verdict, "%s\n%s", r, x.gateway.log)
			assert.Zero(t, r.Different)
			assert.False(t, r.Disturbed, "nobody else was there")
		})
	}
}

// yamlToJSON turns one line of YAML into JSON.
func yamlToJSON(t *testing.T, text string) json.RawMessage {
	t.Helper()
	var v any
	require.NoError(t, yaml.Unmarshal([]byte(text), &v))
	if v == nil {
		return nil
	}
	raw, err := json.Marshal(v)
	require.NoError(t, err)
	return raw
}

func (x pairOf) verify(t *testing.T, c *protocol) *reuse.Report {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	conn, err := connector.Open(config.Spec{Type: c.connector, Config: yamlToJSON(t, c.config)})
	require.NoError(t, err)
	target := reuse.Target{Ask: reuse.Gateway(x.gateway.client, client, nil), Connector: conn,
		Prefill: []string{x.p.URL()}, Decode: []string{x.d.URL()}, Model: "tiny", Client: client}
	if c.alone {
		target.Alone = x.alone.URL()
	}
	r, err := reuse.Verify(t.Context(), target, reuse.Options{Probes: 2})
	require.NoError(t, err)
	return r
}

func TestVerifyFindsBrokenTransfers(t *testing.T) {
	t.Parallel()
	for _, c := range protocols {
		for name, b := range c.broken {
			t.Run(c.title()+"/"+name, func(t *testing.T) {
				t.Parallel()
				c := c
				good := c.prepare
				c.prepare = func(t *testing.T, c *protocol) {
					if good != nil {
						good(t, c)
					}
					b.change(t, c)
				}
				x := c.start(t)
				r := x.verify(t, &c)
				assert.Equal(t, b.verdict, r.Verdict, "%s\n%s", r, x.gateway.log)
				assert.Contains(t, r.String(), b.reason)
			})
		}
	}
}

// Every connector there is has a case, and one in which its transfer is broken.
func TestEveryConnectorHasACase(t *testing.T) {
	broken := map[string]int{}
	for _, c := range protocols {
		broken[c.connector] += len(c.broken)
	}
	for _, name := range names.Connectors() {
		if name == "stored-for-tests" {
			continue // a connector of these tests' own
		}
		assert.Positive(t, broken[name], "%s", name)
	}
}

func nixlProtocols() (rows []protocol) {
	rows = append(rows, protocol{
		connector: "nixl",
		apis:      vllmAPIs,
		broken: map[string]broken{
			"D without a connector": loneD,
			"P without a connector": loneP,
		},
	})
	return rows
}
