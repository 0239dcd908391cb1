// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/cmd/internal/builttest"
)

func TestMain(m *testing.M) {
	recovery = 5 * time.Second
	goleak.VerifyTestMain(m)
}

// failures runs the cases and returns the ids of those that fail, in order.
func failures(t *testing.T, g gateway, o Options, patterns ...string) []string {
	t.Helper()
	cases, err := Select(patterns)
	require.NoError(t, err)
	report, err := Run(t.Context(), g, cases, o)
	require.NoError(t, err)
	found := []string{}
	for _, r := range report.Results {
		assert.NotEqual(t, Skip, r.Verdict, "%s: %s", r.ID, r.Saw)
		if r.Verdict == Fail {
			found = append(found, r.ID)
			t.Log(r.Line())
		}
	}
	slices.Sort(found)
	return found
}

// The gateway of this repository, built and started as a stranger would.
func TestTheExampleGatewayKeepsTheRules(t *testing.T) {
	config, err := os.ReadFile("../pdctl/testdata/conform-gateway.yaml")
	require.NoError(t, err)
	cases, err := Select(nil)
	require.NoError(t, err)
	cases = slices.DeleteFunc(cases, func(c Case) bool { return c.ID == "field/hanging-pair" }) // see below
	gateway := &Command{Args: []string{builttest.Program(t, "gateway"), "-config", "{config}"}, Config: string(config)}
	report, err := Run(t.Context(), gateway, cases, Options{Parallel: 8})
	require.NoError(t, err)
	for _, r := range report.Results {
		want := Pass
		switch r.ID {
		case "wire/health": // it is at the admin address
			want = Skip
		case "retry/overload": // 502, and Retry-After only where health probes know that no engine is there
			want = Fail
		}
		assert.Equal(t, want, r.Verdict, r.Line())
	}
}

// What is off by default: a limit for transfers, and comments while prefill is slow.
func TestTheExampleGatewayKeepsTheRulesWithItsOptions(t *testing.T) {
	config, err := os.ReadFile("../pdctl/testdata/conform-gateway.yaml")
	require.NoError(t, err)
	cases, err := Select([]string{"field/hanging-pair", "field/slow-*", "field/error-*"})
	require.NoError(t, err)
	with := strings.Replace(string(config), "    type: nixl\n", "    type: nixl\n    timeouts: {transfer: 6s}\n"+
		"  keepAlive: {after: 500ms}\n", 1)
	gateway := &Command{Args: []string{builttest.Program(t, "gateway"), "-config", "{config}"}, Config: with}
	report, err := Run(t.Context(), gateway, cases, Options{Parallel: 8})
	require.NoError(t, err)
	for _, r := range report.Results {
		assert.Equal(t, Pass, r.Verdict, r.Line())
	}
}

func TestAGatewayWithoutFaultsPasses(t *testing.T) {
	assert.Empty(t, failures(t, gateway{}, Options{Parallel: 8}))
}

// mutants are faults of the small gateway, and the cases that must find them.
var mutants = map[string]string{
	"answers decode's 400 with 200": "retry/decode-400",
	"answers half":                  "stream/cut stream/cut-unary",
	"answers nonsense with 500":     "security/not-an-object security/not-json",
	"believes clients":              "security/transfer-members security/transfer-members-twice",
	"copies all headers":            "wire/hop-by-hop",
	"copies without flushing":       "stream/flush",
	"copies without cancelling": "cancel/decode-waiting cancel/many cancel/prefill cancel/prefill-no-decode " +
		"cancel/silent-stream cancel/stream cancel/unary",
	"decodes after 400": "retry/prefill-400",
	"decodes after a failed prefill": "retry/prefill-500 retry/prefill-500-once retry/prefill-all-refused " +
		"retry/prefill-reset",
	"discards cut streams":          "stream/cut-keeps-chunks",
	"drops Retry-After":             "retry/overload retry/rate-limit",
	"drops headers":                 "field/api-key wire/authorization wire/request-id wire/traceparent",
	"drops the handoff":             "coupling/concurrent coupling/streams wire/chat wire/completions wire/handoff",
	"ends at once":                  "drain/prefill drain/stream",
	"exits with 1":                  "drain/exit",
	"forgets max_completion_tokens": "wire/max-completion-tokens",
	"forgets who made a response":   "field/stored-responses",
	"gives up for good":             "retry/recovers",
	"hangs during the drain":        "drain/new-requests",
	"has no health path":            "wire/health",
	"has no models":                 "wire/models",
	"hides texts":                   "retry/prefill-400-text",
	"is impatient":                  "field/silence-within field/slow-prefill stream/silence",
	"keeps ambiguous connections":   "security/length-and-chunks",
	"keeps min_tokens":              "wire/min-tokens",
	"knows members":                 "wire/engine-options wire/prefill-options wire/unknown-members",
	"knows short prompts":           "wire/large-prompt",
	"knows text prompts only":       "wire/token-prompt",
	"loses the usage":               "stream/usage",
	"makes cuts clean":              "stream/cut stream/cut-kill",
	"never retries":                 "retry/decode-refused retry/prefill-refused",
	"panics on deep JSON":           "security/deep-json",
	"prefills all tokens":           "wire/max-completion-tokens wire/prefill-one-token",
	"reads Latin-1":                 "wire/escapes",
	"reads bodies of any size":      "security/large-body",
	"relays anything": "coupling/handoff-absent coupling/handoff-incomplete coupling/handoff-null " +
		"coupling/handoff-null-members coupling/handoff-null-once coupling/prefill-garbage",
	"relays known members":        "wire/handoff wire/handoff-unknown-members",
	"remembers handoffs":          "coupling/same-prompt",
	"retries 400":                 "retry/prefill-400-once",
	"rewrites events":             "stream/bytes",
	"rounds numbers":              "wire/handoff-integers wire/integers",
	"salts decode only":           "wire/prefill-options",
	"streams prefill":             "wire/prefill-not-streamed",
	"swallows errors":             "stream/error-event",
	"swaps answers":               "security/http-1.0 security/keep-alive",
	"takes the first length":      "security/two-lengths",
	"takes the first member":      "security/duplicate-members",
	"tells addresses":             "security/engine-addresses",
	"tells no type":               "stream/content-type",
	"asks one connection":         "field/processes",
	"bills what decode took over": "field/cached-tokens",
	"ends failures well":          "field/slow-prefill-fails",
	"keeps alive by text":         "field/slow-prefill",
	"knows one model":             "field/adapter",
	"relays nulls":                "coupling/handoff-null-members",
	"waits for transfers":         "field/hanging-pair",
	"asks one engine":             "field/adapter-on-one-decode field/adapter-on-one-prefill field/key-of-one-engine",
	"drops keys":                  "field/api-key",
	"has little memory":           "field/heads",
	"obeys":                       "field/orders",
	"relays any ending":           "field/error-ending field/error-ending-stream",
	"shifts responses":            "field/surplus-response",
	"tells engines' texts":        "field/names-in-errors",
	"uses a handoff twice":        "retry/decode-500 retry/decode-load-failure",
}

func TestEachFaultIsFoundByItsCases(t *testing.T) {
	slots := make(chan struct{}, 8)
	for fault, ids := range mutants {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			slots <- struct{}{}
			defer func() { <-slots }()
			want := strings.Fields(ids)
			found := failures(t, gateway{fault}, Options{Parallel: 4, once: true}, want...)
			if !slices.Equal(want, found) { // on a busy machine a fault may show too late for its case
				found = failures(t, gateway{fault}, Options{Parallel: 1, once: true}, want...)
			}
			assert.Equal(t, want, found)
		})
	}
}

// A case that nothing has failed proves nothing.
func TestEachCaseHasFailedOnce(t *testing.T) {
	var found []string
	for _, ids := range mutants {
		found = append(found, strings.Fields(ids)...)
	}
	for _, c := range Cases() {
		assert.Contains(t, found, c.ID)
		assert.Contains(t, Groups, c.Group())
	}
}

// docs/conformance.md has a row for each case, and its rule.
func TestThePageKnowsEachCase(t *testing.T) {
	page, err := os.ReadFile("../../docs/conformance.md")
	require.NoError(t, err)
	for _, c := range Cases() {
		assert.Contains(t, string(page), "| `"+c.ID+"` | "+string(c.Severity)+" |")
		assert.Contains(t, string(page), "`"+c.ID+"`: "+c.Rule)
	}
}

func TestReportsHaveAllFormats(t *testing.T) {
	r := &Report{Gateway: "g 1", Date: "2026-11-24", Results: []Result{
		{ID: "wire/chat", Group: "wire", Severity: Must, Rule: "r", Verdict: Fail, Want: "a", Saw: "<b>"},
		{ID: "stream/bytes", Group: "stream", Severity: Should, Rule: "r", Verdict: Fail, Want: "c", Saw: "d"},
		{ID: "drain/exit", Group: "drain", Severity: Should, Rule: "r", Verdict: Skip, Saw: "why"},
	}}
	for format, want := range map[string][]string{
		"text":  {"  fail  must    wire/chat\n", "expected a; saw <b>", "must: 0 passed, 1 failed, 0 skipped"},
		"json":  {`"saw": "<b>"`, `"verdict": "skip"`},
		"junit": {`tests="3" failures="1" skipped="2"`, `message="expected a; saw &lt;b&gt;" type="must"`},
		"html":  {"Expected a; saw &lt;b&gt;.", `<td class="skip">skip</td>`},
	} {
		var b strings.Builder
		require.NoError(t, Formats[format](r, &b))
		for _, text := range want {
			assert.Contains(t, b.String(), text, format)
		}
	}
	var b strings.Builder
	require.NoError(t, Table(&b, []*Report{r}))
	assert.Contains(t, b.String(), "| `wire/chat` | must | **fail** |\n")
}

func TestCommandsAreFilledForEachEngine(t *testing.T) {
	f := &filler{prefill: []string{"p1", "p2"}, decode: []string{"d1", "d2"},
		words: map[string]string{"{port}": "1", "{config}": "c"}}
	assert.Equal(t, []string{"g", "--port=1", "--prefill", "p1", "--prefill", "p2", "--decode=d1", "--decode=d2", "c"},
		f.args([]string{"g", "--port={port}", "--prefill", "{prefill}", "--decode={decode}", "{config}"}))
	assert.Equal(t, "a: {x: 1}\n- p1\n- p2\n", f.lines("a: {x: {port}}\n- {prefill}\n"))
	assert.NotEqual(t, f.fill("{port2}"), f.fill("{port3}"))
	require.NoError(t, f.err)
}

func TestAGatewayThatDoesNotStartIsToldWithItsLog(t *testing.T) {
	g := &Command{Args: []string{"sh", "-c", "echo no such flag; exit 2"}}
	_, err := Run(t.Context(), g, Cases()[:1], Options{})
	require.ErrorContains(t, err, "no such flag")
}

func TestAFaultIsFoundByNothingElse(t *testing.T) {
	assert.Equal(t, []string{"stream/cut", "stream/cut-kill"}, failures(t, gateway{"makes cuts clean"},
		Options{Parallel: 8}, "stream", "coupling", "retry"))
}
