// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/lab/internal/apis"
)

// sglangVersion is the version that sglang/install.sh installs.
const sglangVersion = "0.5.23"

// What SGLang 0.5.23 counts. D's prompt tokens are those of all requests, and realtime_tokens_total has those that it
// computed itself.
var (
	sglangPrompts  = sample{"sglang:prompt_tokens_total", ""}
	sglangComputed = sample{"sglang:realtime_tokens_total", `mode="prefill_compute"`}
	sglangMoved    = sample{"sglang:kv_transfer_total_mb_sum", ""} // P, in 2^20 bytes
)

// sglangTokenBytes is the size of a token's KV in the tiny model: keys and values, 2 layers, 2 heads of 32 floats.
const sglangTokenBytes = 2 * 2 * 2 * 32 * 4

// sglangLab is a pair of SGLang's engines, launched as the connector renders them, and an engine without
// disaggregation, with whose responses all others are compared.
type sglangLab struct {
	*lab
	conn      connector.KVConnector
	pair      []discovery.Endpoint
	p, d, one *process
}

// proveSGLang installs SGLang if need be, proves the connector sglang, shows that http in its place is found out, and
// plays the faults.
func proveSGLang(ctx context.Context, l *lab) (err error) {
	//nolint:gosec // G204: beside the script of the caller's choice
	install := exec.CommandContext(ctx, filepath.Join(filepath.Dir(l.script), "sglang", "install.sh"))
	install.Stdout, install.Stderr = os.Stdout, os.Stderr
	if err := install.Run(); err != nil {
		return fmt.Errorf("installing SGLang: %w", err)
	}
	conn, err := connector.Open(config.Spec{Type: "sglang"})
	if err != nil {
		return err
	}
	s := &sglangLab{lab: l, conn: conn}
	begin := time.Now()
	all, err := sglangEndpoints(discovery.RolePrefill, discovery.RoleDecode, discovery.RoleBoth)
	if err != nil {
		return err
	}
	s.pair = all[:2:2]
	started, err := s.launch(ctx, nil, all...)
	defer func() {
		for _, engine := range s.started {
			if engine.Name != "gateway" {
				engine.stop()
			}
		}
	}()
	if err != nil {
		return err
	}
	s.p, s.d, s.one = started[0], started[1], started[2]
	fmt.Printf("SGLang %s: two engines, and one alone, ready after %.0f s\n", sglangVersion,
		time.Since(begin).Seconds())
	return errors.Join(
		timed("pdctl verify and all APIs", func() error { return s.judge(ctx, "sglang", 0, "reused, ") }),
		timed("http in its place", func() error {
			return s.judge(ctx, "http", 1, "connector http relays nothing")
		}),
		timed("faults", func() error { return s.playSGLangFaults(ctx) }),
	)
}

// sglangEndpoints are entries of engines that do not run yet.
func sglangEndpoints(roles ...discovery.Role) (all []discovery.Endpoint, err error) {
	for _, role := range roles {
		port, bootstrap, err := twoPorts()
		if err != nil {
			return nil, err
		}
		var attributes map[string]string
		if role == discovery.RolePrefill {
			attributes = map[string]string{"bootstrapPort": bootstrap}
		}
		all = append(all, endpoint(role, port, attributes))
	}
	return all, nil
}

func timed(what string, do func() error) error {
	begin := time.Now()
	err := do()
	fmt.Printf("sglang: %s took %.0f s\n\n", what, time.Since(begin).Seconds())
	return err
}

// launch starts engines with the settings that the connector renders, and more arguments of the script.
func (s *sglangLab) launch(ctx context.Context, more []string, engines ...discovery.Endpoint) ([]*process, error) {
	var wanted []engineOptions
	for _, e := range engines {
		settings, err := render(s.conn, nil, e, engines, sglangVersion)
		if err != nil {
			return nil, err
		}
		o := engineOptions{script: filepath.Join(filepath.Dir(s.script), "sglang", "engine.sh"),
			role: e.Role.String(), port: e.URL.Port(), more: append(arguments(settings), more...)}
		if e.Role.Has(discovery.RoleBoth) {
			o.role = "alone"
		}
		wanted = append(wanted, o)
	}
	return s.startEngines(ctx, wanted...)
}

// judge lets pdctl verify judge a connector on the pair. It requires an exit status and a part of the report, and of a
// pair that is to be proven that it serves all requests.
func (s *sglangLab) judge(ctx context.Context, typ string, want int, says string) error {
	gateway, err := s.startGateway(ctx, gatewayOptions{connector: typ, endpoints: s.pair})
	if err != nil {
		return err
	}
	odd, err := s.verify(ctx, gateway, "sglang, kvConnector.type "+typ, want, says, "--alone", s.one.url)
	if err == nil && want == 0 {
		var more []string
		more, err = s.survey(ctx, gateway.url)
		odd = append(odd, more...)
	}
	return asItMustBe(odd, errors.Join(err, stopGateway(gateway)))
}

// sglangProblem says what is not proven by a row; "" if nothing.
func sglangProblem(r row) string {
	switch {
	case r.wrong != "":
		return r.wrong
	case r.response.mode != "disaggregated":
		return "not served by two engines"
	case !r.reused():
		return fmt.Sprintf("decode took over %d of %d prompt tokens, %d of %d bytes", r.tokens,
			r.response.PromptTokens, r.bytes, r.wantBytes)
	}
	return ""
}

// survey sends each request to the gateway and to the engine alone, and a request that the legs cannot carry.
func (s *sglangLab) survey(ctx context.Context, gateway string) (odd []string, err error) {
	var rows []row
	for _, q := range sglangRequests() {
		row, err := s.compare(ctx, gateway, q)
		if err != nil {
			return nil, err
		}
		if problem := sglangProblem(row); problem != "" {
			odd = append(odd, fmt.Sprintf("%s: %s", q, problem))
		}
		rows = append(rows, row)
	}
	printRows(os.Stdout, rows)
	for _, q := range []question{
		newQuestion(apis.Chat, false, 40, 8).with("chat, n: 2", map[string]any{"n": 2}),
		newQuestion(apis.SGLang, false, 40, 8).with("generate, n: 2",
			map[string]any{"sampling_params": map[string]any{"n": 2}}),
	} {
		a := askSGLang(ctx, gateway, q, nil)
		fmt.Printf("%s: %s\n", q, a)
		if a.status != http.StatusBadRequest || a.took > 2*time.Second {
			odd = append(odd, fmt.Sprintf("%s: %s; must be refused at once", q, a))
		}
	}
	return odd, nil
}

func (s *sglangLab) compare(ctx context.Context, gateway string, q question) (row, error) {
	one := askSGLang(ctx, s.one.url, q, nil)
	if one.Err != nil || one.status != http.StatusOK || !one.Whole || len(one.Texts) == 0 {
		return row{}, fmt.Errorf("%s: one engine alone: %s: %w", q, one, errors.Join(one.Err))
	}
	before, err := s.counters(ctx)
	if err != nil {
		return row{}, err
	}
	r := row{question: q, response: askSGLang(ctx, gateway, q, nil)}
	r.wrong, r.wantBytes = r.response.differs(one), r.response.PromptTokens*sglangTokenBytes
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		now, err := s.counters(ctx)
		if err != nil {
			return r, err
		}
		prompts := rise(before[1], now[1], sglangPrompts)
		r.tokens = prompts - rise(before[1], now[1], sglangComputed)
		r.bytes = int(math.Round((now[0].sum(sglangMoved) - before[0].sum(sglangMoved)) * (1 << 20)))
		if prompts >= r.response.PromptTokens && r.bytes >= r.wantBytes || r.wrong != "" || time.Now().After(end) {
			return r, nil
		}
	}
}

// counters are the metrics of P and D.
func (s *sglangLab) counters(ctx context.Context) (pages [2]metrics, err error) {
	for i, engine := range []*process{s.p, s.d} {
		if pages[i], err = readMetrics(ctx, engine.url); err != nil {
			return pages, fmt.Errorf("%s engine: %w", engine.Name, err)
		}
	}
	return pages, nil
}
