// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const dashboardFile = "prometheus/dashboard.json"

// A panel of the Grafana dashboard. M in a query stands for the labels of the chosen models. Empty is what stands there
// while Prometheus has nothing for it: most panels of failures have nothing while all is well.
type panel struct {
	title, about, unit string
	stacked            bool
	empty              string
	queries            []query
}

const (
	noData     = "No data"
	noneYet    = "none counted"
	inspecting = "needs -inspect"
	probing    = "needs -synthetic-probe"
	admitting  = "needs spec.admission"
	tokens     = "si:tok/s"
)

type query struct{ legend, expr string }

type dashboardRow struct {
	title  string
	panels []panel
}

// quantiles are the queries for a histogram's tail.
func quantiles(histogram string) []query {
	var qs []query
	for _, q := range []string{"0.5", "0.95", "0.99"} {
		qs = append(qs, query{"p" + strings.TrimPrefix(q+"0", "0.")[:2],
			"histogram_quantile(" + q + ", sum by (le) (rate(" + histogram + "_bucket{M}[$__rate_interval])))"})
	}
	return qs
}

// mean is a histogram's mean.
func mean(legend, histogram, labels string) query {
	if labels != "" {
		labels = "," + labels
	}
	rate := func(suffix string) string {
		return "sum(rate(" + histogram + suffix + "{M" + labels + "}[$__rate_interval]))"
	}
	return query{legend, rate("_sum") + " / " + rate("_count")}
}

// perSecond is a counter's rate by labels.
func perSecond(counter string, by ...string) query {
	var legend []string
	for _, label := range by {
		legend = append(legend, "{{"+label+"}}")
	}
	return query{strings.Join(legend, " "),
		"sum by (" + strings.Join(by, ", ") + ") (rate(" + counter + "{M}[$__rate_interval]))"}
}

// prefixed is the query with a word before its legend.
func prefixed(word string, q query) query { return query{word + ": " + q.legend, q.expr} }

// First what clients see, then why.
var dashboard = []dashboardRow{
	{"Requests", []panel{
		{"Requests by outcome", "Served by a pair of engines or by one; and errors.", "reqps", true, noData, []query{
			{"{{pd_mode}}", "sum by (pd_mode) " +
				`(rate(pd_request_duration_seconds_count{M,error_type=""}[$__rate_interval]))`},
			{"{{error_type}}", "sum by (error_type) " +
				`(rate(pd_request_duration_seconds_count{M,error_type!=""}[$__rate_interval]))`},
		}},
		{"In flight", "By what they wait for. Other: prepare, event, backoff.", "short", true, noData,
			[]query{
				{"{{pd_phase}}", `sum by (pd_phase) (pd_requests_in_flight{M,pd_phase!~"backoff|event|prepare"})`},
				{"other", `sum(pd_requests_in_flight{M,pd_phase=~"backoff|event|prepare"})`},
			}},
		{"Duration", "Whole requests, streams to their end.", "s", false, noData,
			quantiles("pd_request_duration_seconds")},
		{"Refused at the door", "Wrong paths, bodies and models: no flow took them.", "reqps", true, noneYet,
			[]query{{"{{error_type}}", "sum by (error_type) (rate(pd_requests_refused_total[$__rate_interval]))"}}},
	}},
	{"Tokens", []panel{
		{"Time to the first token", "Streams, from the request's last byte to the first content.", "s", false, noData,
			quantiles("pd_time_to_first_chunk_seconds")},
		{"Where that time goes", "Means of the parts, one upon the other.", "s", true, noData, []query{
			{"queue", "sum(rate(pd_admission_wait_seconds_sum{M}[$__rate_interval])) / " +
				"sum(rate(pd_request_duration_seconds_count{M}[$__rate_interval]))"}, // not all have waited
			mean("prefill", "pd_leg_duration_seconds", `pd_leg="prefill"`),
			mean("between the legs", "pd_handoff_age_seconds", ""),
			mean("transfer, decode's queue", "pd_transfer_duration_seconds", ""),
		}},
		{"Time of each further token", "Streams, by each token after the first.", "s", false, noData,
			quantiles("pd_time_per_output_token_seconds")},
		{"Tokens a second", "As engines count them.", tokens, false, noData,
			[]query{perSecond("pd_tokens_total", "pd_token_type")}},
	}},
	{"Overload", []panel{
		{"Waiting for an engine", "Requests that wait for an engine with room (spec.admission).", "short", false,
			admitting, []query{{"waiting", "sum(pd_admission_queued{M})"}}},
		{"How long they waited", "Requests that had to wait and were admitted (spec.admission).", "s", false, admitting,
			quantiles("pd_admission_wait_seconds")},
		{"Refused for overload", "By the limit that was reached.", "reqps", true, noneYet, []query{
			perSecond("pd_admission_refused_total", "pd_reason"),
			{"maxBytesInFlight", "sum(rate(pd_bytes_refused_total[$__rate_interval]))"},
		}},
		{"Bodies in flight", "Bytes of bodies and prefill responses, which maxBytesInFlight limits.", "decbytes", false,
			noData, []query{{"bodies", "sum(pd_bytes_in_flight)"}}},
	}},
	{"Failures", []panel{
		{"Faults of legs", "By leg and code.", "reqps", true, noneYet, []query{{"{{pd_leg}} {{error_type}}",
			`sum by (pd_leg, error_type) (rate(pd_leg_duration_seconds_count{M,error_type!=""}[$__rate_interval]))`}}},
		{"Retries", "Second attempts, by leg and reason.", "reqps", true, noneYet,
			[]query{perSecond("pd_retries_total", "pd_leg", "pd_reason")}},
		{"Not retried", "Failed attempts, by why there was no other.", "reqps", true, noneYet,
			[]query{perSecond("pd_retries_skipped_total", "pd_reason")}},
		{"Fallbacks, rescues, hedges", "Served otherwise than configured; streams whose decode engine died; second " +
			"prefills beside slow ones.", "reqps", false, noneYet, []query{
			prefixed("fallback", perSecond("pd_fallbacks_total", "error_type")),
			prefixed("rescue", perSecond("pd_rescues_total", "pd_result")),
			prefixed("hedge", perSecond("pd_hedges_total", "pd_reason")),
		}},
	}},
	{"Engines", []panel{
		{"Engines by phase", "Of each role.", "short", true, noData, []query{
			{"{{pd_role}} ready", `sum by (pd_role) (pd_endpoints{M,pd_phase="ready"})`},
			{"{{pd_role}} {{pd_phase}}", `sum by (pd_role, pd_phase) (pd_endpoints{M,pd_phase!="ready"})`},
		}},
		{"Running in engines", "Requests, as the engines say (-inspect).", "short", false, inspecting,
			[]query{{"{{pd_role}}", "sum by (pd_role) (pd_engine_requests_running{M})"}}},
		{"Waiting in engines", "Requests in their queues, as the engines say (-inspect).", "short", false, inspecting,
			[]query{{"{{pd_role}}", "sum by (pd_role) (pd_engine_requests_waiting{M})"}}},
		{"Engines that corrupt KV", "Named by attestation.", "short", true, noneYet,
			[]query{{"{{pd_prefill}} {{pd_decode}}", "pd_attest_named{M}"}}},
	}},
	{"KV", []panel{
		{"Prompt tokens by source", "What decode took over, and what engines computed (-inspect).", tokens, true,
			inspecting, []query{perSecond("pd_engine_prompt_tokens_total", "pd_role", "pd_source")}},
		{"KV moved", "As engines count it (-inspect).", "Bps", true, inspecting,
			[]query{perSecond("pd_engine_kv_bytes_total", "pd_role")}},
		{"KV memory in use", "Of the fullest engine of each role (-inspect).", "percentunit", false, inspecting,
			[]query{{"{{pd_role}}", "max by (pd_role) (pd_engine_kv_usage_ratio{M})"}}},
		{"Failed moves of KV", "As engines count them (-inspect): broken, or read by nobody within the lease.", "reqps",
			false, inspecting, []query{
				prefixed("failed", perSecond("pd_engine_kv_failures_total", "pd_role")),
				prefixed("expired", perSecond("pd_engine_kv_expired_total", "pd_role")),
			}},
		{"Age of handoffs", "When decode is asked. Far below the lease is well.", "s", false, noData,
			quantiles("pd_handoff_age_seconds")},
		{"KV that nobody reads", "Handoffs left to their lease, and decode engines left without one.", "reqps", false,
			noneYet, []query{
				{"unread", "sum(rate(pd_attempts_expired_total{M}[$__rate_interval]))"},
				{"orphans", "sum(rate(pd_orphans_total{M}[$__rate_interval]))"},
			}},
		{"Reuse", "Share of a synthetic probe's prompt that decode took over (-synthetic-probe).", "percentunit",
			false, probing, []query{{"{{gen_ai_request_model}}", "min by (gen_ai_request_model) (pd_reuse_ratio{M})"}}},
		{"Synthetic probes", "Of reuse and of attestation, by verdict (-synthetic-probe).", "reqps", false, probing,
			[]query{
				prefixed("reuse", perSecond("pd_reuse_checks_total", "pd_verdict")),
				prefixed("attestation", perSecond("pd_attest_probes_total", "pd_verdict")),
			}},
	}},
}

// Queries beside that of what is well. Their series are red.
var unwell = map[string]string{"Requests by outcome": "B", "Engines by phase": "B"}

// dashboardJSON is what Grafana imports (schema 39, Grafana 10.4 and later).
func dashboardJSON() []byte {
	type object = map[string]any
	source := object{"type": "prometheus", "uid": "${datasource}"}
	models := `gen_ai_request_model=~"$model"`
	var panels []object
	id, y := 0, 0
	place := func(x, w, h int) object { return object{"x": x, "y": y, "w": w, "h": h} }
	for _, row := range dashboard {
		id++
		panels = append(panels, object{"id": id, "type": "row", "title": row.title, "collapsed": false,
			"gridPos": place(0, 24, 1), "panels": []object{}})
		y++
		const across = 4 // in each row, so that all panels stand in the same columns
		for i, p := range row.panels {
			id++
			var targets []object
			for n, q := range p.queries {
				targets = append(targets, object{"refId": string(rune('A' + n)), "datasource": source,
					"expr": strings.ReplaceAll(q.expr, "{M", "{"+models), "legendFormat": q.legend})
			}
			stacking, line, fill := "none", 2, 0
			if p.stacked { // areas without lines: the line of one that is 0 would lie upon the others
				stacking, line, fill = "normal", 0, 70
			}
			defaults := object{"unit": p.unit, "min": 0, "noValue": p.empty, "color": object{"mode": "palette-classic"},
				"custom": object{"lineWidth": line, "fillOpacity": fill, "showPoints": "never",
					"stacking": object{"mode": stacking, "group": "A"}}}
			overrides := []object{}
			if ref := unwell[p.title]; ref != "" {
				overrides = append(overrides, object{"matcher": object{"id": "byFrameRefID", "options": ref},
					"properties": []object{{"id": "color", "value": object{"mode": "shades", "fixedColor": "red"}}}})
			}
			if p.unit == "percentunit" {
				defaults["max"] = 1 // else a share that hardly changes looks like a storm
			}
			panels = append(panels, object{"id": id, "type": "timeseries", "title": p.title, "description": p.about,
				"datasource": source, "gridPos": place(i%across*(24/across), 24/across, 8), "targets": targets,
				"fieldConfig": object{"overrides": overrides, "defaults": defaults},
				"options": object{"legend": object{"displayMode": "list", "placement": "bottom", "showLegend": true},
					"tooltip": object{"mode": "multi", "sort": "desc"}}})
			if i%across == across-1 || i == len(row.panels)-1 {
				y += 8
			}
		}
	}
	variables := []object{
		{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
		{"name": "model", "label": "model", "type": "query", "datasource": source, "refresh": 2, "sort": 1,
			"query":      "label_values(pd_requests_in_flight, gen_ai_request_model)",
			"definition": "label_values(pd_requests_in_flight, gen_ai_request_model)",
			"multi":      true, "includeAll": true, "allValue": ".*",
			"current": object{"text": []string{"All"}, "value": []string{"$__all"}}},
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out) // which ends each value with a new line: so each panel is a line of its own
	enc.SetEscapeHTML(false)
	write := func(v any) {
		if err := enc.Encode(v); err != nil {
			panic(err) // maps of strings and numbers
		}
		out.Truncate(out.Len() - 1)
	}
	write(object{"title": "pdkit gateway", "uid": "pdkit-gateway", "tags": []string{"pdkit"},
		"description": "What prefill and decode engines and the gateway between them do: docs/metrics.md",
		"timezone":    "browser", "schemaVersion": 39, "version": 1, "editable": true, "refresh": "30s",
		"time": object{"from": "now-1h", "to": "now"}, "graphTooltip": 1,
		"templating": object{"list": variables}, "annotations": object{"list": []object{}}})
	out.Truncate(out.Len() - 1) // its last brace
	out.WriteString(",\n\"panels\":[")
	for i, p := range panels {
		out.WriteString([]string{"\n", ",\n"}[min(i, 1)])
		write(p)
	}
	out.WriteString("\n]}\n")
	return out.Bytes()
}

// expressions are the dashboard's queries, as Prometheus gets them for one model.
func expressions(t *testing.T, window string) map[string]string {
	t.Helper()
	var file struct {
		Panels []struct {
			Title   string
			Targets []struct{ RefID, Expr string }
		}
	}
	data, err := os.ReadFile(dashboardFile)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &file))
	exprs := map[string]string{}
	for _, p := range file.Panels {
		for _, target := range p.Targets {
			exprs[p.Title+" "+target.RefID] = strings.NewReplacer("$__rate_interval", window, "$model", "tiny").
				Replace(target.Expr)
		}
	}
	require.NotEmpty(t, exprs)
	return exprs
}

func TestTheDashboardIsOfToday(t *testing.T) {
	if os.Getenv("PDKIT_UPDATE") != "" {
		require.NoError(t, os.WriteFile(dashboardFile, dashboardJSON(), 0o644))
	}
	data, err := os.ReadFile(dashboardFile)
	require.NoError(t, err)
	assert.Equal(t, string(dashboardJSON()), string(data),
		"write it anew: PDKIT_UPDATE=1 go test -run TheDashboard ./gateway")
	_, err = drawDashboard(time.Now(), time.Now(), "5m", func(string) ([]series, error) { return nil, nil })
	require.NoError(t, err)
	for name, expr := range expressions(t, "5m") {
		for _, metric := range metricNames.FindAllString(expr, -1) {
			assert.True(t, isDocumented(t, metric), "%s: docs/metrics.md has no %s", name, metric)
		}
	}
}

// checkDashboard asks a Prometheus that has scraped a gateway under load for every panel. All queries are answered, and
// those of requests with numbers.
func checkDashboard(t *testing.T, ask func(expr string) (values []string, err error)) {
	t.Helper()
	for name, expr := range expressions(t, "4s") {
		_, err := ask(expr)
		require.NoError(t, err, "%s: %s", name, expr)
		title, _, _ := strings.Cut(name, " ")
		switch title {
		case "Requests", "In", "Duration", "Time", "Tokens", "Age", "Engines", "Reuse":
			if words, ref := name[:len(name)-2], name[len(name)-1:]; words == "Engines that corrupt KV" ||
				unwell[words] == ref {
				continue
			}
			// A scrape that took too long on a busy machine leaves a gap.
			assert.EventuallyWithT(t, func(c *assert.CollectT) {
				values, err := ask(expr)
				assert.NoError(c, err)
				assert.NotEmpty(c, values)
				assert.NotContains(c, values, "NaN")
			}, 20*time.Second, 100*time.Millisecond, "%s: %s", name, expr)
		}
	}
	_, err := ask("sum(")
	assert.Error(t, err, "a query with a fault is told")
}
