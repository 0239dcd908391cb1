// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

// played is a fleet of two prefill and three decode engines, a gateway in front of it, and clients, while something
// goes wrong.
type played struct {
	*program
	p, d    []*enginesim.Engine
	yaml    string
	engines []*enginesim.Engine // prefill and decode in turn
}

func newPlayed(t *testing.T, change func(c *enginesim.Config)) *played {
	t.Helper()
	f := &played{}
	for i := range 3 {
		c := [2]enginesim.Config{}
		for side := range c {
			c[side] = enginesim.Config{KeepRequests: -1, ITL: 5 * time.Millisecond}
			if change != nil {
				change(&c[side])
			}
		}
		p, d, err := enginesim.Pair(c[0], c[1])
		require.NoError(t, err)
		t.Cleanup(func() { d.Thaw(); _ = p.Close(); _ = d.Close() })
		if f.d = append(f.d, d); i == 2 {
			f.engines = append(f.engines, nil, d)
			continue
		}
		f.p, f.engines = append(f.p, p), append(f.engines, p, d)
	}
	return f
}

// serve starts the gateway with this configuration, and clients that send ten requests a second.
func (f *played) serve(t *testing.T, yaml string, args ...string) *played {
	t.Helper()
	f.yaml = yaml
	f.program = start(t, yaml, append([]string{"-inspect", "2s"}, args...)...)
	f.clients(10)
	return f
}

// clients sends so many streamed requests a second, whose clients wait for 5 s.
func (f *played) clients(perSecond int) {
	ctx, stop := context.WithCancel(f.t.Context())
	var all sync.WaitGroup
	f.t.Cleanup(func() { stop(); all.Wait() })
	all.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(perSecond))
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			all.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
				defer cancel()
				liveRequest(ctx, f.program, fmt.Sprintf(`{"model":"tiny","prompt":"%d %s","max_tokens":16,
					"stream":true}`, i, strings.Repeat("some words ", 5+i%40)))
			})
		}
	})
}

// expiring is an engine behind HTTPS, whose certificate may end.
type expiring struct {
	*httptest.Server
	ca     string // the file of its authority
	expire func()
}

func newExpiring(t *testing.T, engine string) *expiring {
	t.Helper()
	target, err := url.Parse(engine)
	require.NoError(t, err)
	dir, a := t.TempDir(), sharedtest.NewAuthority(t, "engines")
	lists(t, filepath.Join(dir, "ca.PEM"), string(a.PEM))
	certificate := func(life time.Duration) *tls.Config {
		a.Life = life
		issue(t, a, dir, "engine")
		pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "engine.pem"), filepath.Join(dir, "engine-key.pem"))
		require.NoError(t, err)
		return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}
	}
	var now atomic.Pointer[tls.Config]
	now.Store(certificate(time.Hour))
	e := &expiring{Server: httptest.NewUnstartedServer(httputil.NewSingleHostReverseProxy(target)),
		ca: filepath.Join(dir, "ca.PEM")}
	e.Config.ErrorLog = log.New(io.Discard, "", 0)
	e.TLS = &tls.Config{MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return now.Load(), nil }}
	e.StartTLS()
	t.Cleanup(e.Close)
	e.expire = func() {
		now.Store(certificate(-time.Minute))
		e.CloseClientConnections()
	}
	return e
}

// incidents are bad days of operators, each with what names its cause: a line of the log.
var incidents = []struct {
	what  string
	play  func(t *testing.T) (f *played, goesWrong func())
	names string // in the log; <P0> and so on stand for engines
	then  string // what an operator does
}{
	{"a prefill engine is killed", func(t *testing.T) (*played, func()) {
		f := newPlayed(t, nil)
		return f.serve(t, gatewayYAML("")+simYAML("", f.engines...)), f.p[0].Kill
	}, `"engine is not ready" model=tiny endpoint=<P0> error.kind=refused`,
		"Start it again; requests go to the others."},
	{"a decode engine is killed in mid-stream", func(t *testing.T) (*played, func()) {
		f := newPlayed(t, nil)
		return f.serve(t, gatewayYAML("")+simYAML("", f.engines...)), func() {
			f.d[0].Inject(enginesim.Fault{Kind: enginesim.FaultKill, AfterChunks: 5})
		}
	}, `error.code=stream_broken error.leg=decode error.phase=stream error.endpoint=<D0>`,
		"Start it again; [rescue](rescue.md) lets greedy streams go on elsewhere."},
	{"a decode engine freezes", func(t *testing.T) (*played, func()) {
		f := newPlayed(t, nil)
		return f.serve(t, gatewayYAML("")+simYAML("", f.engines...)), f.d[0].Freeze
	}, `"engine is not ready" model=tiny endpoint=<D0> error.kind=timeout`, "Take it out, and look at its GPU."},
	{"prefill and decode engines have different stores", func(t *testing.T) (*played, func()) {
		f := newPlayed(t, func(c *enginesim.Config) {
			c.Connector, c.Extra = "sharedstorage", map[string]string{"shared_storage_path": t.TempDir()}
		})
		return f.serve(t, gatewayYAML("")+simYAML("  kvConnector: {type: sharedstorage}\n", f.engines...),
			"-synthetic-probe", "3s"), func() {}
	}, `"KV is not reused as it should be" model=tiny verdict="not reused" .*the store is not shared`,
		"Mount the same store, `pdctl check` compares the settings. It needs `-synthetic-probe`."},
	{"decode comes after the end of the lease", func(t *testing.T) (*played, func()) {
		f := newPlayed(t, func(c *enginesim.Config) { c.Lease = 500 * time.Millisecond })
		return f.serve(t, gatewayYAML("")+simYAML("", f.engines...)), func() {
			f.d[0].Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Leg: enginesim.LegDecode, Delay: time.Second,
				Count: -1})
		}
	}, `"engine is not well" model=tiny endpoint=<P\d> fault="lease over"`,
		"Raise `kv_lease_duration`, or take out the decode engine that has the mark `slow`: " +
			"[PDHandoffsUnread](../runbook.md#pdhandoffsunread)."},
	{"more requests come than the engines can serve", func(t *testing.T) (*played, func()) {
		f := newPlayed(t, func(c *enginesim.Config) { c.MaxRunning, c.ITL = 4, 40*time.Millisecond })
		return f.serve(t, gatewayYAML("")+simYAML("", f.engines...)), func() { f.clients(40) } // they can do 18
	}, `"goodput collapses: admission is off" model=tiny`, "[PDGoodputCollapses](../runbook.md#pdgoodputcollapses)."},
	{"a configuration with a mistake is loaded", func(t *testing.T) (*played, func()) {
		f := newPlayed(t, nil)
		f.serve(t, gatewayYAML("")+simYAML("", f.engines...))
		return f, func() { f.configure(strings.Replace(f.yaml, "kvConnector", "kvConector", 1)) }
	}, `"the configuration is not reloaded, and nothing has changed" .*config.yaml:\d+: spec.kvConector: ` +
		`unknown field; did you mean kvConnector`, "Mend the line. `-check` finds it before."},
	{"the certificate of an engine is over", func(t *testing.T) (*played, func()) {
		f := newPlayed(t, nil)
		front := newExpiring(t, f.p[0].URL())
		f.serve(t, gatewayYAML("")+serverYAML("tiny", nixlConnector+"  tls: {caFile: "+front.ca+"}\n",
			entry(front.URL, "prefill", nil), entry(f.d[0].URL(), "decode", nil)))
		return f, front.expire
	}, `"engine is not ready" model=tiny .*the engine's certificate has expired`,
		"Renew it; the gateway needs no restart."},
	{"names come and go in DNS", func(t *testing.T) (*played, func()) {
		f, names := newPlayed(t, nil), newNameServer(t)
		set := func(decode ...*enginesim.Engine) {
			names.set(t, "prefill.test", f.p...)
			names.set(t, "decode.test", decode...)
		}
		set(f.d...)
		f.serve(t, gatewayYAML("")+serverYAML("tiny", nixlConnector+"  discovery: {dns: {prefill: prefill.test, "+
			"decode: decode.test, resolver: \""+names.addr+"\"}}\n"))
		return f, func() {
			for i := range 6 {
				set(f.d[:(i%2)*3]...)
				time.Sleep(1500 * time.Millisecond)
			}
		}
	}, `msg=discovery model=tiny error=".*dns: decode: the name has no records \(the last list stays\)"`,
		"Look at what answers for the name; the gateway keeps the last list that was whole."},
	{"the engines' model is renamed", func(t *testing.T) (*played, func()) {
		f := newPlayed(t, nil)
		return f.serve(t, gatewayYAML("")+simYAML("", f.engines...)), func() {
			for _, p := range f.p {
				p.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusNotFound, Count: -1,
					Leg: enginesim.LegPrefill, Body: `{"error":{"message":"The model ` + "`tiny`" +
						` does not exist.","type":"NotFoundError","param":"model","code":404}}`})
			}
		}
	}, `"engine is not well" model=tiny endpoint=<P\d> fault="lacks the model"`,
		"Give the engines the name with `--served-model-name`, or the ModelServer theirs."},
}

// Of each incident the log names the cause, in words that say what to do, and the engine that it is of.
func TestTheCauseOfAnIncidentIsNamed(t *testing.T) {
	took := make([]time.Duration, len(incidents))
	t.Run("incident", func(t *testing.T) {
		for i, x := range incidents {
			t.Run(x.what, func(t *testing.T) {
				t.Parallel()
				f, goesWrong := x.play(t)
				address := func(e *enginesim.Engine) string { return strings.TrimPrefix(e.URL(), "http://") }
				expected := strings.NewReplacer("<P0>", address(f.p[0]), "<D0>", address(f.d[0]), `<P\d>`, `\S+`).
					Replace(x.names)
				named := regexp.MustCompile(expected)
				time.Sleep(2 * time.Second) // all is well
				if x.what != "prefill and decode engines have different stores" {
					require.NotContains(t, f.log.String(), "level=WARN")
				}
				begin := time.Now()
				goesWrong()
				require.Eventually(t, func() bool { return named.MatchString(f.log.String()) }, 90*time.Second,
					50*time.Millisecond, "%s in %s", expected, f.log)
				took[i] = time.Since(begin)
			})
		}
	})
	if t.Failed() || os.Getenv("PDKIT_UPDATE") == "" {
		return
	}
	const page, begin, end = "../../docs/reliability/incidents.md", "<!-- incidents -->\n", "<!-- /incidents -->\n"
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	head, rest, _ := bytes.Cut(text, []byte(begin))
	_, tail, found := bytes.Cut(rest, []byte(end))
	require.True(t, found)
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s%s| what happens | seconds | the log says | then |\n|---|---|---|---|\n", head, begin)
	for i, x := range incidents {
		fmt.Fprintf(&b, "| %s | %.0f | `%s` | %s |\n", x.what, took[i].Seconds(),
			strings.NewReplacer(`.*`, "…", `\d+`, "N", `\d`, "N", `\(`, "(", `\)`, ")").
				Replace(x.names), x.then)
	}
	fmt.Fprintf(&b, "%s%s", end, tail)
	assert.NoError(t, os.WriteFile(page, b.Bytes(), 0o644))
}
