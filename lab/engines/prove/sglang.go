// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
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
	at        [2]launchedEngine // P and D
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
	for i := range s.at {
		if s.at[i], err = newEngine(); err != nil {
			return err
		}
	}
	s.pair = []discovery.Endpoint{s.prefill(s.at[0]), s.at[1].endpoint(discovery.RoleDecode, nil)}
	other, err := newEngine()
	if err != nil {
		return err
	}
	started, err := s.launch(ctx, nil, s.pair[0], s.pair[1], other.endpoint(discovery.RoleBoth, nil))
	defer func() {
		for _, engine := range s.started {
			if engine.name != "gateway" {
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

// launchedEngine is where an engine listens.
type launchedEngine struct{ port, side string }

func newEngine() (e launchedEngine, err error) {
	if e.port, err = freePort(); err == nil {
		e.side, err = freePort()
	}
	return e, err
}

func (e launchedEngine) endpoint(role discovery.Role, attributes map[string]string) discovery.Endpoint {
	return discovery.Endpoint{ID: role.String(), URL: &url.URL{Scheme: "http", Host: "127.0.0.1:" + e.port}, Role: role,
		Attributes: attributes}
}

func timed(what string, do func() error) error {
	begin := time.Now()
	err := do()
	fmt.Printf("sglang: %s took %.0f s\n\n", what, time.Since(begin).Seconds())
	return err
}

func (*sglangLab) prefill(e launchedEngine) discovery.Endpoint {
	return e.endpoint(discovery.RolePrefill, map[string]string{"bootstrapPort": e.side})
}

// launch starts engines with the settings that the connector renders, and more arguments of the script.
func (s *sglangLab) launch(ctx context.Context, more []string, engines ...discovery.Endpoint) ([]*process, error) {
	version, err := launch.ParseVersion(sglangVersion)
	if err != nil {
		return nil, err
	}
	var wanted []engineOptions
	for _, e := range engines {
		settings, err := launch.Render(s.conn, nil,
			launch.Target{Endpoint: e, Engines: engines, Model: "tiny", Version: version, CPU: true},
		)
		if err != nil {
			return nil, err
		}
		o := engineOptions{script: filepath.Join(filepath.Dir(s.script), "sglang", "engine.sh"),
			role: e.Role.String(), port: e.URL.Port(), more: slices.Clone(more)}
		if e.Role.Has(discovery.RoleBoth) {
			o.role = "alone"
		}
		for _, env := range settings.Env {
			o.more = append(o.more, env.Name+"="+env.Value)
		}
		o.more = append(o.more, settings.Args...)
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
	//nolint:gosec // G204: the program is built by this one
	cmd := exec.CommandContext(ctx, filepath.Join(s.dir, "pdctl"), "verify", "-f", gateway.config, "--gateway",
		gateway.url, "--alone", s.one.url)
	output, err := cmd.CombinedOutput()
	status := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		status, err = exit.ExitCode(), nil
	}
	fmt.Printf("sglang, kvConnector.type %s: pdctl verify ends with %d\n%s", typ, status, output)
	var odd []string
	if status != want || !strings.Contains(string(output), says) {
		odd = append(odd, fmt.Sprintf("pdctl verify was to end with %d and to say %q", want, says))
	}
	if err == nil && want == 0 {
		var more []string
		more, err = s.survey(ctx, gateway.url)
		odd = append(odd, more...)
	}
	if err = errors.Join(err, stopGateway(gateway)); err != nil || len(odd) == 0 {
		return err
	}
	fmt.Printf("NOT as it must be:\n  - %s\n", strings.Join(odd, "\n  - "))
	return errNotProven
}

// sglangRow is what one request got, and what the engines counted meanwhile.
type sglangRow struct {
	request      sglangRequest
	reply        *sglangReply
	wrong        string // what differs from the reply of one engine alone; "": nothing
	taken, moved int    // prompt tokens that D did not compute, and bytes that P sent
}

// problem says what is not proven by a row; "" if nothing.
func (r sglangRow) problem() string {
	n := r.reply.promptTokens
	switch {
	case r.wrong != "":
		return r.wrong
	case r.reply.mode != "disaggregated":
		return "not served by two engines"
	case n == 0 || r.taken != n || r.moved != n*sglangTokenBytes:
		return fmt.Sprintf("decode took over %d of %d prompt tokens, %d of %d bytes", r.taken, n, r.moved,
			n*sglangTokenBytes)
	}
	return ""
}

// survey sends each request to the gateway and to the engine alone, and a request that the legs cannot carry.
func (s *sglangLab) survey(ctx context.Context, gateway string) (odd []string, err error) {
	var rows []sglangRow
	for _, q := range sglangRequests() {
		row, err := s.compare(ctx, gateway, q)
		if err != nil {
			return nil, err
		}
		if problem := row.problem(); problem != "" {
			odd = append(odd, fmt.Sprintf("%s: %s", q, problem))
		}
		rows = append(rows, row)
	}
	printSGLang(os.Stdout, rows)
	for _, q := range []sglangRequest{
		sglangOf(chat, false, 40, 8).with("chat, n: 2", map[string]any{"n": 2}),
		sglangGenerate("generate, n: 2", false, newPrompt(40), 8,
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

func (s *sglangLab) compare(ctx context.Context, gateway string, q sglangRequest) (sglangRow, error) {
	one := askSGLang(ctx, s.one.url, q, nil)
	if one.err != nil || one.status != http.StatusOK || !one.whole || len(one.texts) == 0 {
		return sglangRow{}, fmt.Errorf("%s: one engine alone: %s: %w", q, one, errors.Join(one.err))
	}
	before, err := s.counters(ctx)
	if err != nil {
		return sglangRow{}, err
	}
	row := sglangRow{request: q, reply: askSGLang(ctx, gateway, q, nil)}
	row.wrong = row.reply.differs(one)
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		now, err := s.counters(ctx)
		if err != nil {
			return row, err
		}
		prompts := rise(before[1], now[1], sglangPrompts)
		row.taken = prompts - rise(before[1], now[1], sglangComputed)
		row.moved = int(math.Round((now[0].sum(sglangMoved) - before[0].sum(sglangMoved)) * (1 << 20)))
		n := row.reply.promptTokens
		if prompts >= n && row.moved >= n*sglangTokenBytes || row.wrong != "" || time.Now().After(end) {
			return row, nil
		}
	}
}

// counters are the metrics of P and D.
func (s *sglangLab) counters(ctx context.Context) (pages [2]metrics, err error) {
	for i, engine := range []*process{s.p, s.d} {
		if pages[i], err = readMetrics(ctx, engine.url); err != nil {
			return pages, fmt.Errorf("%s engine: %w", engine.name, err)
		}
	}
	return pages, nil
}

func printSGLang(w io.Writer, rows []sglangRow) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "request\tstatus\tserved\tseconds\tas one engine\tprompt tokens\ttaken over\t"+
		"bytes moved\texpected")
	for _, r := range rows {
		equal := "yes"
		if r.wrong != "" {
			equal = "NO: " + r.wrong
		}
		fmt.Fprintf(table, "%s\t%d\t%s\t%.2f\t%s\t%d\t%d\t%d\t%d\n", r.request, r.reply.status, r.reply.mode,
			r.reply.took.Seconds(), equal, r.reply.promptTokens, r.taken, r.moved,
			r.reply.promptTokens*sglangTokenBytes)
	}
	_ = table.Flush()
}
