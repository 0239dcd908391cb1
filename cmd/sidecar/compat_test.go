// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
)

// manifests are the arguments that templates and charts give their sidecars, and a list of engines: only the list has
// to be added to a manifest. In order: KServe's kserve-config-llm-decode-template with and without TLS (kserve
// 01b12410, the second as rendered), the same of the release 0.20.0 and of aaac4e29 after it, the chart
// llm-d-modelservice 3051935e with all its options, and guides of llm-d (9829045e, 04291b76, 0e9d7f1c, 6e4afadd).
var manifests = map[string]struct {
	env  map[string]string
	args []string
	warn int
	want func(*flags) bool
}{
	"KServe with TLS": {
		env: map[string]string{"INFERENCE_POOL_NAMESPACE": "ns", "INFERENCE_POOL_NAME": "pool",
			"SSL_CERT_DIR": "/var/run/kserve/tls"},
		args: []string{"--port=8000", "--vllm-port=8001", "--kv-connector=nixlv2", "--enable-ssrf-protection=true",
			"--pool-group=inference.networking.x-k8s.io",
			"--secure-proxy=true", "--cert-path=/var/run/kserve/tls", "--decoder-use-tls=true",
			"--prefiller-use-tls=true"},
		want: func(f *flags) bool {
			return f.modelServerPort == 8001 && f.secure && f.certPath == "/var/run/kserve/tls" &&
				f.tls == stages{prefiller: true, decoder: true} && f.pool.name == "pool"
		},
	},
	"KServe without TLS": {
		args: []string{"--port=8000", "--vllm-port=8001", "--kv-connector=nixlv2", "--enable-ssrf-protection=true",
			"--pool-group=inference.networking.x-k8s.io",
			"--secure-proxy=false", "", "", ""},
		want: func(f *flags) bool { return f.modelServerPort == 8001 && !f.secure },
	},
	"KServe 0.20 with TLS": {
		env: map[string]string{"INFERENCE_POOL_NAMESPACE": "ns", "INFERENCE_POOL_NAME": "pool",
			"SSL_CERT_DIR": "/var/run/kserve/tls"},
		args: []string{"--port=8000", "--vllm-port=8001", "--kv-connector=nixlv2", "--enable-ssrf-protection=true",
			"--pool-group=inference.networking.x-k8s.io", "--inference-pool=ns/pool", "--secure-proxy=true",
			"--cert-path=/var/run/kserve/tls", "--enable-tls=decoder", "--enable-tls=prefiller"},
		want: func(f *flags) bool {
			return f.modelServerPort == 8001 && f.tls == stages{prefiller: true, decoder: true} &&
				f.pool == poolFlags{group: oldPoolGroup, namespace: "ns", name: "pool"}
		},
	},
	"KServe 0.20 without TLS": {
		args: []string{"--port=8000", "--vllm-port=8001", "--kv-connector=nixlv2", "--enable-ssrf-protection=true",
			"--pool-group=inference.networking.x-k8s.io", "--inference-pool=ns/pool", "--secure-proxy=false", "",
			"", ""},
		want: func(f *flags) bool { return f.modelServerPort == 8001 && !f.secure && f.pool.name == "pool" },
	},
	"chart": {
		env: map[string]string{"OTEL_SERVICE_NAME": "routing-proxy", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel:4317",
			"OTEL_TRACES_EXPORTER": "otlp",
			"OTEL_TRACES_SAMPLER":  "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"},
		args: []string{"--port=8000", "--vllm-port=8200", "--connector=nixlv2", "--zap-devel=false",
			"--zap-encoder=json", "--zap-log-level=5", "--zap-stacktrace-level=error",
			"--zap-time-encoding=rfc3339", "--secure-proxy=false", "--prefiller-use-tls=false", "--cert-path=/certs"},
		warn: 1, // about --cert-path
		want: func(f *flags) bool { return f.modelServerPort == 8200 && f.json && f.tls == stages{} },
	},
	"guide pd": {
		args: []string{"--port=8000", "--kv-connector=nixlv2", "--zap-log-level=1", "--secure-serving=false"},
		want: func(f *flags) bool { return f.modelServerPort == 8200 && !f.secure },
	},
	"guide wide-ep": {
		args: []string{"--port=8000", "--vllm-port=8200", "--data-parallel-size=8", "--connector=nixlv2",
			"--zap-log-level=1", "--secure-proxy=false", "--enable-prefiller-sampling"},
		want: func(f *flags) bool { return f.ranks == 8 && f.sampling },
	},
	"guide e-pd": {
		args: []string{"--port=8000", "--ec-connector=ec-nixl", "--zap-log-level=1", "--secure-serving=false",
			"--encoders=10.0.0.9:8000"},
		want: func(f *flags) bool { return f.ecConnector == "ec-nixl" && f.kvConnector == "nixlv2" },
	},
	"guide mooncake": {
		args: []string{"--port=8000", "--vllm-port=8200", "--connector=mooncake", "--zap-log-level=1",
			"--secure-proxy=false"},
		want: func(f *flags) bool { return f.kvConnector == "mooncake" },
	},
	"guide MoRI-IO": {
		env: map[string]string{"POD_IP": "10.0.0.6"},
		args: []string{"--port=8000", "--vllm-port=8200", "--kv-connector=nixlv2", "--zap-log-level=1",
			"--secure-proxy=false", "--moriio-write-mode", "--moriio-tp-size=2",
			"--moriio-parallel-dispatch", "--moriio-local-pod-ip=10.0.0.6"},
		want: func(f *flags) bool {
			return f.moriio.write && f.moriio.parallel && f.moriio.tp == 2 && f.moriio.podIP == "10.0.0.6"
		},
	},
}

func TestTheFlagsOfManifestsAreTaken(t *testing.T) {
	for name, m := range manifests {
		f, problem := parse(t, func(name string) string { return m.env[name] },
			append(m.args, "--prefillers=10.0.0.1:8000")...)
		if !assert.NotNil(t, f, "%s: %s", name, problem) {
			continue
		}
		assert.True(t, m.want(f), "%s: %+v", name, f)
		assert.Len(t, f.warnings, m.warn, name)
		s, err := build(f, slog.New(slog.DiscardHandler), &telemetry{})
		require.NoError(t, err, name)
		s.legs.close()
	}
}

// With KServe's arguments the sidecar serves a request and answers KServe's probes.
func TestAManifestOfKServeIsServed(t *testing.T) {
	p, d := twoEngines(t, enginesim.Config{}, enginesim.Config{})
	m := manifests["KServe without TLS"]
	args := append(m.args, "--port=0", "--vllm-port="+portOf(t, d.URL()), "--prefillers="+hostPort(t, p.URL()))
	x := start(t, nil, args...)
	status, _, response := fetch(t, x.addr+"/health")
	assert.Equal(t, http.StatusOK, status)
	assert.Empty(t, response)
	assert.Empty(t, d.Requests(), "the engine has probes of its own")
	assert.Equal(t, http.StatusOK,
		statusOf(ask(t, http.DefaultClient, http.MethodHead, "http://"+x.addr+"/health", "")))
	status, h, response := complete(t, x.addr, 0, true, header, hostPort(t, p.URL()))
	require.Equal(t, http.StatusOK, status, response)
	assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"))
}

// MoRI-IO's write mode is chosen by llm-d's flags: in llm-d's serial order, and with both legs at once.
func TestEnginesThatWriteAreServedByTheFlagsOfLLMD(t *testing.T) {
	for order, more := range map[connector.Order][]string{connector.PrefillThenDecode: nil,
		connector.Together: {"--moriio-parallel-dispatch"}} {
		t.Run(fmt.Sprint(more), func(t *testing.T) {
			f, problem := parse(
				t, noEnv, append(more, "--prefillers=p:1", "--moriio-write-mode", "--moriio-local-pod-ip=127.0.0.1")...,
			)
			require.Empty(t, problem)
			c, err := f.connector()
			require.NoError(t, err)
			assert.Equal(t, order, c.Traits().Order)
			p, d := twoEngines(t, enginesim.Config{Connector: "moriio"}, enginesim.Config{Connector: "moriio"})
			alone := lone(t, enginesim.Config{})
			ps, ds := portOf(t, "tcp://"+p.SideChannel()), portOf(t, "tcp://"+d.SideChannel())
			x := start(t, nil, append(more, "--port=0", "--secure-serving=false", "--vllm-port="+
				portOf(t, d.URL()), "--prefillers="+hostPort(t, p.URL()),
				"--moriio-write-mode", "--moriio-local-pod-ip=127.0.0.1", "--moriio-decode-handshake-port="+ds,
				"--moriio-decode-notify-port="+ds,
				"--moriio-prefill-handshake-port="+ps, "--moriio-prefill-notify-port="+ps)...)
			for n, stream := range []bool{false, true} {
				status, h, response := complete(t, x.addr, n, stream, header, hostPort(t, p.URL()))
				require.Equal(t, http.StatusOK, status, response)
				assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"))
				_, _, want := ask(t, http.DefaultClient, http.MethodPost, alone.URL()+"/v1/completions",
					completion(n, stream))
				assert.Equal(t, text(want), text(response))
			}
			assert.Positive(t, d.Stats().ExternalKVTransfer)
			status, _, response := complete(t, x.addr, 0, false)
			assert.Equal(t, http.StatusBadRequest, status, "such a decode engine would wait for ever: %s", response)
		})
	}
}

// Engines over several pods, by llm-d's flags: D's second pod has this sidecar, and P learns the hosts of both.
func TestEnginesOverSeveralPods(t *testing.T) {
	pod := enginesim.Config{Connector: "moriio", Extra: map[string]string{"data_parallel_size": "2",
		"data_parallel_size_local": "1", "data_parallel_start_rank": "1"}}
	p, d := twoEngines(t, pod, pod)
	ps, ds := portOf(t, "tcp://"+p.SideChannel()), portOf(t, "tcp://"+d.SideChannel())
	x := before(t, d.URL(), nil, "--prefillers="+hostPort(t, p.URL()), "--moriio-write-mode",
		"--moriio-parallel-dispatch", "--moriio-local-pod-ip=127.0.0.1", "--moriio-decode-handshake-port="+ds,
		"--moriio-decode-notify-port="+ds,
		"--moriio-prefill-handshake-port="+ps, "--moriio-prefill-notify-port="+ps, "--moriio-dp-size=2",
		"--moriio-dp-size-local=1", "--moriio-decode-hosts=127.0.0.2,127.0.0.1",
		"--moriio-remote-hosts=127.0.0.2,127.0.0.1")
	status, _, got := complete(t, x.addr, 0, false, header, hostPort(t, p.URL()))
	require.Equal(t, http.StatusOK, status, got)
	assert.Positive(t, d.Stats().ExternalKVTransfer)
	told := func(e *enginesim.Engine, name string) string {
		return gjson.GetBytes(e.Requests()[0].Body, "kv_transfer_params."+name).Raw
	}
	assert.Equal(t, `["127.0.0.2","127.0.0.1"]`, told(p, "remote_hosts"))
	assert.Equal(t, "2 1", told(p, "remote_dp_size")+" "+told(p, "remote_dp_size_local"))
	assert.Equal(t, `["127.0.0.1"]`, told(d, "remote_hosts"))
	assert.Equal(t, "1 1 0", told(d, "remote_dp_size")+" "+told(d, "remote_dp_size_local")+" "+
		told(d, "remote_dp_rank"))
}

func TestAConfigurationFillsInWhatTheCommandLineLeavesOut(t *testing.T) {
	file := filepath.Join(t.TempDir(), "sidecar.yaml")
	require.NoError(
		t, os.WriteFile(
			file, []byte("port: 8085\nvllm-port: 8203\nsecure-proxy: false\nenable-tls: [prefiller, decoder]\n"+
				"prefill-max-retries: 0\n"+
				"prefill-retry-backoff: 1s\nprefillers: p:1\nkv-connector: sglang\ntracing:\n"), 0o600))
	for name, args := range map[string][]string{
		"file": {"--configuration-file=" + file},
		"inline": {"--configuration={port: 8085, vllm-port: 8203, secure-proxy: false, enable-tls: [prefiller, " +
			"decoder], prefill-retry-backoff: 1s, prefillers: 'p:1', kv-connector: sglang}"},
	} {
		f, problem := parse(t, noEnv, args...)
		require.Empty(t, problem, name)
		assert.Equal(t, []any{8085, 8203, false, stages{prefiller: true, decoder: true}, time.Second, "p:1", "sglang"},
			[]any{f.port, f.modelServerPort, f.secure, f.tls, f.backoff, f.prefill.static, f.kvConnector}, name)
		f, problem = parse(
			t, noEnv, append(args, "--port=1", "--model-server-port=2", "--secure-serving", "--enable-tls=encoder",
				"--connector=mooncake")...,
		)
		require.Empty(t, problem, name)
		assert.Equal(t, []any{1, 2, true, stages{encoder: true}, "mooncake", time.Second},
			[]any{f.port, f.modelServerPort, f.secure, f.tls, f.kvConnector, f.backoff},
			"%s: the command line wins, by old names and new", name)
	}
	f, _ := parse(t, noEnv, "--configuration={vllm-port: 8203, model-server-port: 8204, secure-serving: false, "+
		"secure-proxy: true, kv-connector: sglang, connector: mooncake, prefillers: 'p:1'}")
	assert.Equal(t, []any{8204, false, "sglang"}, []any{f.modelServerPort, f.secure, f.kvConnector}, "new names win")
}

func TestAConfigurationThatIsWrongEndsTheStart(t *testing.T) {
	for text, part := range map[string]string{
		"{unheard: 1}":            `no setting "unheard"`,
		"{configuration-file: x}": "no setting",
		"{port: x}":               "port",
		"{port: 1, port: 2}":      "twice",
		"[port]":                  "not a YAML mapping",
		"{port: {a: b}}":          "neither a value nor a list",
		"{moriio-write-mode: true, moriio-local-pod-ip: 10.0.0.1, moriio-dp-size: 2, moriio-dp-size-local: 1, " +
			"moriio-decode-hosts: [a]}": "IP addresses",
		"{moriio-parallel-dispatch: x}": "parse error",
	} {
		f, problem := parse(t, noEnv, "--prefillers=p:1", "--configuration="+text)
		assert.Nil(t, f, text)
		assert.Contains(t, problem, part, text)
	}
	_, problem := parse(t, noEnv, "--prefillers=p:1", "--configuration-file="+filepath.Join(t.TempDir(), "none"))
	assert.Contains(t, problem, "cannot be read")
	_, problem = parse(t, noEnv, "--prefillers=p:1", "--configuration-file=x", "--configuration={}")
	assert.Contains(t, problem, "exclude each other")
}

// When the sidecar starts it warns of each flag that it accepts but that has no effect.
func TestFlagsWithoutEffectAreWarnedOf(t *testing.T) {
	_, _, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil, "--decode-chunk-size=64", "--enable-p2p-pull=true",
		"--zap-devel")
	log := x.log.String()
	assert.Equal(t, 2, strings.Count(log, "level=WARN"), log)
	assert.Contains(t, log, "--decode-chunk-size is ignored")
	assert.Contains(t, log, "--enable-p2p-pull is ignored")
}
