// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

// prometheusTool returns the path of a program that prometheus/install.sh has brought.
func prometheusTool(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs("../../.tools/prometheus/" + name)
	require.NoError(t, err)
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("cmd/gateway/prometheus/install.sh has not been run: ", err)
		}
		t.Skip("Prometheus is not installed: run cmd/gateway/prometheus/install.sh")
	}
	return path
}

// Each alert fires in its scenario and in no other: see rules_test.yaml.
func TestTheRulesPassPromtool(t *testing.T) {
	promtool := prometheusTool(t, "promtool")
	for _, args := range [][]string{{"check", "config", "prometheus.yml"}, {"check", "rules", "rules.yaml"},
		{"test", "rules", "rules_test.yaml"}} {
		cmd := exec.CommandContext(t.Context(), promtool, args...)
		cmd.Dir = "prometheus"
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "promtool %s\n%s", strings.Join(args, " "), out)
	}
}

// rules are the files' alerts and the metrics that they use.
func rules(t *testing.T) (alerts, metrics []string) {
	t.Helper()
	data, err := os.ReadFile("prometheus/rules.yaml")
	require.NoError(t, err)
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr string
				Annotations map[string]string
			}
		}
	}
	require.NoError(t, yaml.Unmarshal(data, &file))
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			metrics = append(metrics, metricNames.FindAllString(r.Expr, -1)...)
			if r.Alert == "" {
				continue
			}
			assert.Equal(t, "docs/runbook.md#"+strings.ToLower(r.Alert), r.Annotations["runbook_url"])
			if !slices.Contains(alerts, r.Alert) {
				alerts = append(alerts, r.Alert)
			}
		}
	}
	return alerts, metrics
}

// The runbook has a section for each alert, and each rule is of metrics and labels that the gateway has.
func TestTheRunbookAndTheRulesAreOfOnePiece(t *testing.T) {
	alerts, metrics := rules(t)
	runbook, err := os.ReadFile("../../docs/runbook.md")
	require.NoError(t, err)
	var sections []string
	for _, m := range regexp.MustCompile(`(?m)^## (PD\w+)$`).FindAllStringSubmatch(string(runbook), -1) {
		sections = append(sections, m[1])
	}
	assert.Equal(t, alerts, sections)
	troubleshooting, err := os.ReadFile("../../docs/troubleshooting.md")
	require.NoError(t, err)
	pages := string(runbook) + string(troubleshooting)
	for _, name := range append(metrics, metricNames.FindAllString(pages, -1)...) {
		assert.True(t, isDocumented(t, name), "docs/metrics.md has no %s", name)
	}
}

var metricNames = regexp.MustCompile(`\bpd_\w+`)

// isDocumented says whether the page of metrics has one.
func isDocumented(t *testing.T, name string) bool {
	t.Helper()
	page, err := os.ReadFile(metricsPage)
	require.NoError(t, err)
	for _, suffix := range []string{"", "_count", "_bucket", "_sum"} {
		if base, cut := strings.CutSuffix(name, suffix); cut && strings.Contains(string(page), "`"+base+"`") {
			return true
		}
	}
	return false
}

// watcher is a Prometheus: the alerts that fire, a query's values now, and those of each second between two times.
type watcher struct {
	firing func() []string
	ask    func(expr string) ([]string, error)
	over   func(expr string, from, to time.Time) ([]series, error)
}

// watchedBy runs a Prometheus that scrapes a gateway, with the project's rules on a scale of seconds.
func watchedBy(t *testing.T, admin, every string) (w watcher) {
	t.Helper()
	server, dir := prometheusTool(t, "prometheus"), t.TempDir()
	data, err := os.ReadFile("prometheus/rules.yaml")
	require.NoError(t, err)
	scaled := regexp.MustCompile(`for: \w+`).ReplaceAllString(string(data), "for: 1s")
	scaled = regexp.MustCompile(`interval: \w+`).ReplaceAllString(scaled, "interval: 500ms")
	scaled = regexp.MustCompile(`\[\d+[mh]\]`).ReplaceAllString(scaled, "[4s]")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "rules.yaml"), []byte(scaled), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "prometheus.yml"), fmt.Appendf(nil,
		"global: {scrape_interval: %[1]s, scrape_timeout: %[1]s, evaluation_interval: 500ms}\n"+
			"rule_files: [rules.yaml]\n"+
			"scrape_configs: [{job_name: pdkit, static_configs: [{targets: [%[2]q]}]}]\n",
		every, strings.TrimPrefix(admin, "http://")), 0o600))
	port, err := freeport.Find(1)
	require.NoError(t, err)
	addr := "127.0.0.1:" + strconv.Itoa(port)
	cmd := exec.CommandContext(t.Context(), server, "--config.file="+filepath.Join(dir, "prometheus.yml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+addr)
	log := &sharedtest.Log{}
	cmd.Stderr = log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	get := func(path string, into any) error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+path, http.NoBody)
		require.NoError(t, err)
		req.Close = true
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		return json.NewDecoder(resp.Body).Decode(into)
	}
	w.ask = func(expr string) (values []string, err error) {
		var out struct {
			Error string
			Data  struct{ Result []struct{ Value []any } }
		}
		if err := get("/api/v1/query?query="+url.QueryEscape(expr), &out); err != nil {
			return nil, err
		}
		if out.Error != "" {
			return nil, errors.New(out.Error)
		}
		for _, r := range out.Data.Result {
			values = append(values, fmt.Sprint(r.Value[1]))
		}
		return values, nil
	}
	w.over = func(expr string, from, to time.Time) ([]series, error) {
		return ranged(get, expr, from, to)
	}
	eventually(t, func() bool {
		up, err := w.ask("up")
		return err == nil && slices.Equal(up, []string{"1"})
	}, "%s", log)
	w.firing = func() []string {
		var out struct {
			Data struct {
				Alerts []struct {
					State  string
					Labels map[string]string
				}
			}
		}
		require.NoError(t, get("/api/v1/alerts", &out), "%s", log)
		var names []string
		for _, a := range out.Data.Alerts {
			if a.State == "firing" && !slices.Contains(names, a.Labels["alertname"]) {
				names = append(names, a.Labels["alertname"])
			}
		}
		slices.Sort(names)
		return names
	}
	return w
}

// ranged asks a Prometheus for a query's value at each second.
func ranged(get func(string, any) error, expr string, from, to time.Time) (all []series, err error) {
	var out struct {
		Error string
		Data  struct {
			Result []struct {
				Metric map[string]string
				Values [][2]any
			}
		}
	}
	if err := get(fmt.Sprintf("/api/v1/query_range?step=1&query=%s&start=%d&end=%d", url.QueryEscape(expr),
		from.Unix(), to.Unix()), &out); err != nil {
		return nil, err
	}
	if out.Error != "" {
		return nil, errors.New(out.Error)
	}
	for _, r := range out.Data.Result {
		s := series{labels: r.Metric, values: make([]float64, to.Unix()-from.Unix()+1)}
		for i := range s.values {
			s.values[i] = math.NaN()
		}
		for _, v := range r.Values {
			at, _ := v[0].(float64)
			if s.values[int64(at)-from.Unix()], err = strconv.ParseFloat(fmt.Sprint(v[1]), 64); err != nil {
				return nil, err
			}
		}
		all = append(all, s)
	}
	return all, nil
}

// A real Prometheus reads the gateway under load: no alert fires while all is well, and then those of what happens.
func TestAlertsAndTheDashboardOfARealPrometheus(t *testing.T) {
	g, _, d := startSim(t, "", "-synthetic-probe", "500ms")
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			body := fmt.Sprintf(`{"model":"tiny","prompt":"some words %d","max_tokens":3}`, i)
			if i%2 == 0 {
				body = strings.TrimSuffix(body, "}") + `,"stream":true,"stream_options":{"include_usage":true}}`
			}
			resp, err := http.Post(g.client+"/v1/completions", "application/json", strings.NewReader(body))
			if err == nil {
				_ = resp.Body.Close()
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	w, began := watchedBy(t, g.admin, "500ms"), time.Now()
	for range 20 { // the windows of the rules are full after 4 s
		require.Empty(t, w.firing())
		time.Sleep(400 * time.Millisecond)
	}
	checkDashboard(t, w.ask)
	checkDrawing(t, w, began)
	d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Leg: enginesim.LegDecode, Count: -1})
	var got []string
	eventually(t, func() bool {
		got = w.firing()
		return slices.Contains(got, "PDErrors") && slices.Contains(got, "PDReuseUnchecked") &&
			!slices.Contains(got, "PDReuseLost") && !slices.Contains(got, "PDNoEngines")
	}, "%v", &got)
	d.ClearFaults()
	require.NoError(t, d.Close())
	eventually(t, func() bool { return slices.Contains(w.firing(), "PDNoEngines") })
}
