// SPDX-License-Identifier: Apache-2.0

package modelserver_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/modelserver"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// object is a ModelServer with this spec.
func object(spec string) []byte {
	return []byte(`{"apiVersion":"networking.serving.volcano.sh/v1alpha1","kind":"ModelServer",` +
		`"metadata":{"name":"m"},"spec":` + spec + `}`)
}

// read reads a ModelServer with this spec.
func read(t *testing.T, spec string) *modelserver.ModelServer {
	t.Helper()
	ms, err := modelserver.Read(object(spec))
	require.NoError(t, err, spec)
	return ms
}

// nobody is a picker without engines.
func nobody() pdflow.Picker { return pick.New(discovery.NewSet(), pick.RoundRobin()) }

func lines(err error) (all []string) {
	for _, fe := range config.FieldErrors(err) {
		all = append(all, fe.Error())
	}
	return all
}

func TestEachFaultIsTold(t *testing.T) {
	for name, c := range map[string]struct {
		object []byte
		want   string // the beginning of one of the faults
	}{
		"not JSON": {[]byte(`{`), "is not JSON"},
		"a list":   {[]byte(`[]`), "is a list, not an object"},
		"no kind": {[]byte(`{"apiVersion":"networking.matrixinfer.ai/v1alpha1","spec":{}}`),
			"kind: is missing"},
		"another kind": {
			[]byte(`{"apiVersion":"networking.matrixinfer.ai/v1alpha1","kind":"ModelRoute","spec":{}}`),
			"kind: is not a known kind",
		},
		"no version": {[]byte(`{"kind":"ModelServer","spec":{}}`), "apiVersion: is missing"},
		"another version": {[]byte(`{"apiVersion":"v1","kind":"ModelServer","spec":{}}`),
			"apiVersion: is not known for kind ModelServer"},
		"no spec": {[]byte(`{"apiVersion":"networking.matrixinfer.ai/v1alpha1","kind":"ModelServer"}`),
			"spec: is missing"},
		"null spec": {object(`null`), "spec: is missing"},
		"name is a number": {
			[]byte(`{"apiVersion":"networking.matrixinfer.ai/v1alpha1","kind":"ModelServer","metadata":{"name":1},` +
				`"spec":{}}`), "metadata.name: is not a string",
		},
		"unknown field": {object(`{"modell":"m"}`), "spec.modell: unknown field; did you mean model?"},
		"port":          {object(`{"workloadPort":{"port":70000}}`), "spec.workloadPort.port: is not a port"},
		"connector": {object(`{"kvConnector":{"type":"nixel"}}`),
			`spec.kvConnector.type: "nixel" is not a known connector; did you mean nixl?`},
		"setting": {object(`{"kvConnector":{"type":"nixl","config":{"leaseDuration":"never"}}}`),
			"spec.kvConnector.config.leaseDuration: is not a duration"},
		"setting, other word": {object(`{"kvConnector":{"type":"nixl","parameters":{"leaseDuration":"never"}}}`),
			"spec.kvConnector.parameters.leaseDuration: is not a duration"},
		"rescue": {object(`{"rescue":{"mode":"sometimes"}}`), "spec.rescue.mode: is not a known mode"},
		"keep-alive without a time": {object(`{"keepAlive":{}}`),
			"spec.keepAlive.after: is not a time above 0"},
		"keep-alive of 0":        {object(`{"keepAlive":{"after":"0s"}}`), "spec.keepAlive.after: is not a time above"},
		"keep-alive of a number": {object(`{"keepAlive":{"after":15}}`), "spec.keepAlive.after: is a number without"},
		"keep-alive by another name": {object(`{"keepAlive":{"interval":"15s"}}`),
			"spec.keepAlive.interval: unknown field"},
		"usage": {object(`{"usage":"none"}`), "spec.usage: is not a known way to count"},
		"rescue, how often": {object(`{"rescue":{"mode":"on","maxPerRequest":0}}`),
			"spec.rescue.maxPerRequest: is not a number of 1 or more"},
		"fallback impossible": {object(`{"kvConnector":{"type":"sglang","fallback":"decode"}}`),
			"spec.kvConnector.fallback: is decode, but a decode engine of sglang cannot serve alone"},
		"inside a fallback": {
			object(`{"kvConnector":{"type":"nixl","fallback":"connector","fallbackConnector":{"type":"x"}}}`),
			`spec.kvConnector.fallbackConnector.type: "x" is not a known connector`,
		},
		"rollout's weight": {object(`{"rollout":{"weight":-1,"kvConnector":{"type":"nixl"}}}`),
			"spec.rollout.weight: is not a percentage"},
		"rollout's connector": {object(`{"rollout":{"weight":1,"kvConnector":{"type":"nixel"}}}`),
			`spec.rollout.kvConnector.type: "nixel" is not a known connector`},
		"encoder without type": {object(`{"encoder":{}}`), "spec.encoder.type: is missing"},
		"no member of discovery": {object(`{"discovery":{}}`),
			"spec.discovery: has no member; write exactly one of static, file, dns, kubernetes, registration"},
		"two members": {object(`{"discovery":{"dns":{},"file":null}}`), "spec.discovery: has file and dns"},
		"no path":     {object(`{"discovery":{"file":{}}}`), "spec.discovery.file.path: is missing"},
		"no engine": {object(`{"discovery":{"static":{}}}`),
			"spec.discovery.static.endpoints: has no endpoint"},
		"engine twice": {
			object(`{"discovery":{"static":{"endpoints":[{"url":"http://a","role":"both"},{"url":"http://A:80",` +
				`"role":"both"}]}}}`), "spec.discovery.static.endpoints[1].url: is listed twice, first as [0]",
		},
		"ports of discovery": {object(`{"discovery":{"kubernetes":{"ports":["8000-"]}}}`),
			"spec.discovery.kubernetes.ports: is not a list of ports"},
		"a port and ports": {object(`{"discovery":{"kubernetes":{"port":8000,"ports":[8000,8001]}}}`),
			"spec.discovery.kubernetes.ports: is given besides port; write one of them"},
		"port of discovery": {object(`{"discovery":{"kubernetes":{"port":-1}}}`),
			"spec.discovery.kubernetes.port: is not a port"},
		"encoder's setting": {object(`{"encoder":{"type":"nixl","config":{"maxItem":1}}}`),
			"spec.encoder.config.maxItem: unknown field; did you mean maxItems?"},
		"encoder's value": {object(`{"encoder":{"type":"nixl","config":{"maxItems":-1}}}`),
			"spec.encoder.config.maxItems: is negative"},
		"unknown encoder": {object(`{"encoder":{"type":"examples"}}`),
			"spec.encoder.type: is not a known encoder; did you mean example?"},
	} {
		t.Run(name, func(t *testing.T) {
			ms, err := modelserver.Read(c.object)
			require.Error(t, err)
			assert.True(t, hasPrefix(lines(err), c.want), "%q", lines(err))
			_, err = ms.Flows(nobody(), nil)
			require.Error(t, err, "what was read with faults makes no flows")
		})
	}
}

func hasPrefix(lines []string, prefix string) bool {
	for _, l := range lines {
		if strings.HasPrefix(l, prefix) {
			return true
		}
	}
	return false
}

func TestValuesOfSettingsAreInNoFault(t *testing.T) {
	_, err := modelserver.Read(
		object(`{"kvConnector":{"type":"lmcache","config":{"redisConfig":{"password":["hunter2"],"port":"hunter2"}}}}`),
	)
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "hunter2")
}

func TestEnginesOfAStaticListAreChecked(t *testing.T) {
	_, err := modelserver.Read(object(`{"kvConnector":{"type":"p2pnccl"},
		"discovery":{"static":{"endpoints":[{"url":"http://127.0.0.1:8100","role":"decode"}]}}}`))
	assert.True(t, hasPrefix(lines(err), "spec.discovery.static.endpoints[0].attributes."), "%q", lines(err))
}

func TestDiscoveryIsOneOfItsMembers(t *testing.T) {
	for spec, want := range map[string]string{
		`{}`: "kubernetes", `{"discovery":{"kubernetes":null}}`: "kubernetes",
		`{"discovery":{"file":{"path":"x"}}}`:   "file",
		`{"discovery":{"dns":{"prefill":"p"}}}`: "dns", `{"discovery":{"registration":{"http":"a:1"}}}`: "registration",
		`{"discovery":{"static":{"endpoints":[{"url":"http://a:1","role":"both"}]}}}`: "static",
	} {
		m := read(t, spec)
		assert.Equal(t, want, m.FoundBy, spec)
	}
}

func TestNotesTellWhatIsOddOrWithoutEffect(t *testing.T) {
	ms := read(t, `{"trafficPolicy":{"timeout":"10s"},"workloadSelector":{"matchLabels":{"app":"m"}},`+
		`"kvConnector":{"type":"mooncake"}}`)
	require.Len(t, ms.Notes, 2)
	assert.True(t, ms.Notes[0].NoEffect)
	assert.Equal(t, "spec.trafficPolicy", ms.Notes[0].Path)
	assert.False(t, ms.Notes[1].NoEffect)
	assert.Equal(t, "spec.kvConnector.type", ms.Notes[1].Path)
}

// A limit of the transfer that comes after the engines have given up, or after decode's own, is told.
func TestATransferLimitThatComesTooLateIsTold(t *testing.T) {
	const late = "is longer than P keeps KV that nobody reads, "
	const waits = "is longer than the engines wait for a transfer, "
	for spec, want := range map[string]string{
		`"nixl","timeouts":{"transfer":"20s"}`:                "",
		`"nixl","timeouts":{"transfer":"40s"}`:                late + "30s",
		`"nixl","timeouts":{"transfer":"20s","decode":"15s"}`: "is not shorter than decode, 15s",
		`"nixl","timeouts":{"decode":"15s"}`:                  "",
		`"nixl","timeouts":{"transfer":"0s"}`:                 "",

		`"trtllm","timeouts":{"transfer":"61s"}`:                                          waits + "1m0s",
		`"trtllm","timeouts":{"transfer":"61s"},"config":{"transferTimeout":"2m"}`:        "",
		`"trtllm","timeouts":{"transfer":"61s"},"config":{"dispatch":"generation-first"}`: waits + "1m0s",

		`"sglang","timeouts":{"transfer":"299s"}`:                                    "",
		`"sglang","timeouts":{"transfer":"301s"}`:                                    waits + "5m0s",
		`"sglang","timeouts":{"transfer":"299s"},"config":{"transferTimeout":"90s"}`: waits + "1m30s",
	} {
		ms := read(t, `{"kvConnector":{"type":`+spec+`}}`)
		var got string
		for _, n := range ms.Notes {
			if n.Path == "spec.kvConnector.timeouts.transfer" {
				got = n.Problem
			}
		}
		assert.Equal(t, want, got, spec)
	}
}

// The engines that are asked for are those that serve, or one of each role where something else lists them.
func TestSettingsWithoutEffectAreTheCallersToName(t *testing.T) {
	list := `,"discovery":{"static":{"endpoints":[{"url":"http://p:1","role":"prefill"},` +
		`{"url":"http://d:1","role":"decode"},{"url":"http://e:1","role":"encode"}]}}`
	for engines, hosts := range map[string][]string{
		"":   {"prefill.example", "decode.example"},
		list: {"p", "d"},
	} {
		ms := read(t, `{"kvConnector":{"type":"nixl","fallback":"connector",`+
			`"fallbackConnector":{"type":"http"}}`+engines+`}`)
		before := len(ms.Notes)
		ms.NoteIdle(func(c *modelserver.Connector, engines []discovery.Endpoint) []config.FieldError {
			var got []string
			for _, e := range engines {
				got = append(got, e.Host())
			}
			assert.Equal(t, hosts, got)
			return []config.FieldError{{Path: "config.x", Problem: "is nothing to " + c.Name}}
		})
		var told []string
		for _, n := range ms.Notes[before:] {
			assert.True(t, n.NoEffect)
			told = append(told, n.Error())
		}
		assert.ElementsMatch(t, []string{"spec.kvConnector.config.x: is nothing to nixl",
			"spec.kvConnector.fallbackConnector.config.x: is nothing to http"}, told)
	}
}

// served is an object's flows over simulated engines, and where they serve.
func served(t *testing.T, spec string, engines ...discovery.Endpoint) (*modelserver.Flows, string) {
	t.Helper()
	set, err := static.NewSet(engines...)
	require.NoError(t, err)
	ms := read(t, spec)
	flows, err := ms.Flows(pick.New(set, pick.RoundRobin()), nil)
	require.NoError(t, err)
	require.NoError(t, flows.Start(t.Context()))
	mux, err := pdflow.NewMux()
	require.NoError(t, err)
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{ms.Model(): flows.Server}))
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		server.Close()
		require.NoError(t, flows.Shutdown(context.Background()))
	})
	return flows, server.URL
}

// ask sends a prompt of 45 tokens and those of its id, which no engine has seen before.
func ask(t *testing.T, url, id string) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions",
		strings.NewReader(`{"model":"m","prompt":"`+id+
			`: where does the crane stand after the storm?","max_tokens":4}`))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Request-Id", id)
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	_ = resp.Body.Close()
	return resp
}

func pair(t *testing.T) (p, d *enginesim.Engine, engines []discovery.Endpoint) {
	t.Helper()
	port, err := freeport.One() // a test may ask P after its end
	require.NoError(t, err)
	p, d, err = enginesim.Pair(enginesim.Config{Model: "m", Listen: "127.0.0.1:" + port}, enginesim.Config{Model: "m"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close(); http.DefaultClient.CloseIdleConnections() })
	for _, e := range []struct {
		url  string
		role discovery.Role
	}{{p.URL(), discovery.RolePrefill}, {d.URL(), discovery.RoleDecode}} {
		x, err := discovery.New(e.url, e.role)
		require.NoError(t, err)
		engines = append(engines, x)
	}
	return p, d, engines
}

func TestAnObjectServes(t *testing.T) {
	_, d, engines := pair(t)
	_, url := served(t, `{"model":"m","kvConnector":{"type":"NixlConnector"}}`, engines...)
	resp := ask(t, url, "a")
	assert.Equal(t, http.StatusOK, resp.StatusCode)
	assert.Equal(t, "disaggregated", resp.Header.Get("X-PD-Mode"))
	assert.EqualValues(t, 46, d.Stats().ExternalKVTransfer, "decode took the prompt's KV over")
}

func TestARolloutGetsItsShare(t *testing.T) {
	_, d, engines := pair(t)
	flows, url := served(t, `{"model":"m","kvConnector":{"type":"nixl"},"rollout":{"weight":50,`+
		`"kvConnector":{"type":"http"}}}`, engines...)
	require.Len(t, flows.All(), 2)
	const n = 40
	for i := range n {
		assert.Equal(t, http.StatusOK, ask(t, url, fmt.Sprintf("%02d", i)).StatusCode)
	}
	taken := int(d.Stats().ExternalKVTransfer) / 47
	assert.Greater(t, taken, n/5, "requests with nixl")
	assert.Less(t, taken, n*4/5, "requests with http, which transfers nothing")
}

func TestAFallbackServesWhatItsConnectorCannot(t *testing.T) {
	p, _, engines := pair(t)
	flows, url := served(t, `{"model":"m","kvConnector":{"type":"nixl","retry":{"maxAttempts":1},`+
		`"fallback":"connector","fallbackConnector":{"type":"http","fallback":"decode","retry":{"maxAttempts":1}}}}`,
		engines...)
	require.Len(t, flows.All(), 2)
	require.NoError(t, p.Close())
	resp := ask(t, url, "a")
	assert.Equal(t, http.StatusOK, resp.StatusCode)
	assert.Equal(t, "fallback", resp.Header.Get("X-PD-Mode"))
}

func TestAnUnsupportedRequestIsRefusedWhereTheObjectSaysSo(t *testing.T) {
	_, _, engines := pair(t)
	_, url := served(t, `{"kvConnector":{"type":"nixl","unsupported":"refuse"}}`, engines...)
	resp, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":["a","b"]}`))
	require.NoError(t, err)
	defer resp.Body.Close()
	assert.Equal(t, http.StatusBadRequest, resp.StatusCode)
}

func TestTimeoutsInEffect(t *testing.T) {
	ms := read(t, `{"kvConnector":{"type":"http","config":{"requestTimeout":"7s","maxRetries":4}}}`)
	limits := ms.Main.Timeouts()
	assert.Equal(t, 7*time.Second, limits.Prefill, "the design documents' requestTimeout")
	assert.Equal(t, 5, ms.Main.Retry().MaxAttempts, "and maxRetries")
	ms = read(t, `{"kvConnector":{"type":"http","config":{"requestTimeout":"7s","maxRetries":3},`+
		`"timeouts":{"prefill":"9s"},"retry":{"maxAttempts":1}}}`)
	assert.Equal(t, 9*time.Second, ms.Main.Timeouts().Prefill, "the newer words win")
	assert.Equal(t, 1, ms.Main.Retry().MaxAttempts)

	ms = read(t, `{"kvConnector":{"type":"nixl","config":{"leaseDuration":"20s"},"timeouts":{"handoff":"3s"}}}`)
	assert.Equal(t, 20*time.Second, ms.Main.Lease())
	assert.Equal(t, 3*time.Second, ms.Main.Timeouts().Handoff)
}

// A transport that is given serves the connectors of its timeout; the others have one of their own, which ends with the
// flows.
func TestFlowsBringTheTransportsThatTheyAreNotGiven(t *testing.T) {
	ms := read(t, `{"kvConnector":{"type":"nixl","timeouts":{"connect":0},"fallback":"connector",`+
		`"fallbackConnector":{"type":"http"}}}`)
	given, err := ms.NewTransport(0, false)
	require.NoError(t, err)
	defer given.Close()
	var asked []time.Duration
	flows, err := ms.Flows(pick.New(discovery.NewSet(), pick.RoundRobin()),
		&modelserver.FlowOptions{Transport: func(connect time.Duration) http.RoundTripper {
			if asked = append(asked, connect); connect == 0 {
				return given
			}
			return nil
		}})
	require.NoError(t, err)
	assert.ElementsMatch(t, []time.Duration{config.None, 2 * time.Second}, asked)
	require.NoError(t, flows.Shutdown(context.Background()))
}

// Flows never speak to engines without the files that the object names.
func TestFlowsNeedTheFilesOfTLS(t *testing.T) {
	_, err := modelserver.Read(object(`{"tls":{"certFile":"client.pem"}}`))
	require.ErrorContains(t, err, "spec.tls")
	none := filepath.Join(t.TempDir(), "none.pem")
	ms := read(t, fmt.Sprintf(`{"tls":{"caFile":%q}}`, none))
	_, err = ms.Flows(nobody(), nil)
	require.ErrorContains(t, err, "spec.tls: transport: CA file "+none)
	ms = read(t, `{"tls":{"serverName":"x"},"discovery":{"static":{"endpoints":[`+
		`{"url":"http://10.0.0.1:1","role":"both"}]}}}`)
	require.Len(t, ms.Notes, 1)
	assert.Equal(t, "spec.tls", ms.Notes[0].Path)
}

func FuzzRead(f *testing.F) {
	f.Add(
		[]byte(`{"apiVersion":"networking.matrixinfer.ai/v1alpha1","kind":"ModelServer","metadata":{"name":"m"},` +
			`"spec":{"model":"m","kvConnector":{"type":"multi","config":{"connectors":[{"type":"nixl"}]}},` +
			`"rollout":{"weight":1,"kvConnector":{"type":"sglang"}},"encoder":{"type":"nixl"}}}`),
	)
	f.Add(
		object(`{"discovery":{"kubernetes":null},"workloadSelector":{"pdGroup":{"groupKey":"g",` +
			`"prefillLabels":{"a":"b"}}},"kvConnector":{"fallback":"connector","fallbackConnector":{}}}`),
	)
	f.Fuzz(func(t *testing.T, raw []byte) {
		ms, err := modelserver.Read(raw)
		if ms.Spec.TLS != (modelserver.TLS{}) {
			return // whose files Flows reads
		}
		flows, ferr := ms.Flows(nobody(), nil)
		if (err == nil) != (ferr == nil) {
			t.Fatalf("read: %v, flows: %v", err, ferr)
		}
		if err == nil {
			if !json.Valid(raw) {
				t.Fatal("read what is not JSON")
			}
			_ = flows.Shutdown(context.Background())
		}
	})
}

// The encode stage goes before each connector, with its own settings.
func TestAnEncodeStageGoesBeforeEachConnector(t *testing.T) {
	ms := read(t, `{"encoder":{"type":"nixl","config":{"maxItems":3}},
		"kvConnector":{"type":"nixl","fallback":"connector","fallbackConnector":{"type":"http"}},
		"rollout":{"weight":1,"kvConnector":{"type":"http"}}}`)
	for _, c := range []*modelserver.Connector{ms.Main, ms.Main.Fallback, ms.Rollout} {
		_, encodes := connector.As[connector.Encoder](c.KVConnector)
		assert.True(t, encodes, c.Name)
	}
}
