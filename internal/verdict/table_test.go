// SPDX-License-Identifier: Apache-2.0

package verdict_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/verdict"
)

// meaning is what a refusal means for a pair of engines, for the engine, and for the client.
type meaning struct{ pair, engine, client string }

var meanings = map[verdict.Scope]meaning{
	verdict.ScopeModel: {"it is given up; up to 8 other engines are asked, and D is not if P says so",
		"is avoided for this model for 10 s, and for no other one; no cooldown", "an answer; this one if all say so"},
	verdict.ScopeContext: {"if the engine's `maxModelLen` is known: it is given up, and up to 8 engines with longer " +
		"contexts are asked; with `fallback: decode` D serves alone if P refuses and D's is longer", "no cooldown",
		"an answer; this one if nobody has a longer context"},
	verdict.ScopeEngine: {"it is given up; one other engine is asked", "no cooldown",
		"an answer; this one if the other engine says so, too"},
	verdict.ScopeResponse: {"none: the request goes to the engine that made the response", "no cooldown",
		"404 `response_not_found`"},
	verdict.ScopeBusy: {"503: another one, within the limits; 429: no other is tried",
		"gets fewer requests for 8 s; Retry-After is heeded",
		"an answer; if none is left, D's own with Retry-After, and for a 503 of P 502"},
	verdict.ScopeNone: {"serves the request", "nothing is known of it",
		"the base model's answer, whatever it has named"},
}

// TestTheTable holds the table of docs/retries.md against the code that decides, and writes it with PDKIT_UPDATE=1.
func TestTheTable(t *testing.T) {
	const page, begin, end = "../../docs/retries.md", "|---|---|---|---|---|---|---|\n", "<!-- /refusals -->"
	var rows strings.Builder
	for i, r := range verdict.Refusals {
		assert.NotContains(t, verdict.Refusals[:i], r, "twice")
		assert.NotContains(t, []string{r.Engine, r.Version, r.Source}, "")
		answer := fmt.Sprint(r.Status)
		for _, member := range [][2]string{{"type", r.Type}, {"param", r.Param}, {"code", r.Code}} {
			if member[1] != "" {
				answer += fmt.Sprintf(", `%s: %s`", member[0], member[1])
			}
		}
		for _, text := range []string{r.Message, r.Holds} {
			if text = strings.ReplaceAll(text, "`", ""); text != "" {
				answer += ", “" + text + "…”"
			}
		}
		if r.Scope == verdict.ScopeNone {
			answer += " for an unknown model"
		}
		m, known := meanings[r.Scope]
		require.True(t, known, r.Scope)
		fmt.Fprintf(&rows, "| %s | %s | %s | %s | %s | %s | %s |\n", r.Engine, r.Version, answer, m.pair, m.engine,
			m.client, r.Source)
	}
	inPage(t, page, begin, end, rows.String())
}

// TestTheTableOfEndings does so with the endings.
func TestTheTableOfEndings(t *testing.T) {
	apis := map[string]string{verdict.FinishReason: "chat, completions, both generate APIs",
		verdict.StopReason: "messages", verdict.Status: "responses", verdict.IncompleteReason: "responses"}
	var rows strings.Builder
	for i, e := range verdict.Endings {
		require.NotEmpty(t, apis[e.Member])
		assert.NotContains(t, verdict.Endings[:i], e, "twice")
		means := string(e.Means)
		if e.Means == verdict.Failure {
			means = "**" + means + "**"
		}
		fmt.Fprintf(&rows, "| %s | `%s: %s` | %s | %s |\n", apis[e.Member], e.Member, e.Value, means, e.Engine)
	}
	inPage(t, "../../docs/retries.md", "|---|---|---|---|\n", "<!-- /endings -->", rows.String())
}

// inPage holds the rows between begin and end on a page, behind the mark that a test writes them.
func inPage(t *testing.T, page, begin, end, rows string) {
	t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	before, _, found := strings.Cut(string(text), end)
	require.True(t, found)
	_, rest, found := strings.Cut(before[strings.LastIndex(before, "<!-- Written by: PDKIT_UPDATE=1"):], begin)
	require.True(t, found)
	if os.Getenv("PDKIT_UPDATE") == "1" {
		now := strings.Replace(string(text), begin+rest+end, begin+rows+end, 1)
		require.NoError(t, os.WriteFile(page, []byte(now), 0o600))
		return
	}
	assert.Equal(t, rows, rest, "PDKIT_UPDATE=1 writes it")
}

func TestARefusalSpeaksOfTheRequestUnlessItIsKnown(t *testing.T) {
	for status, said := range map[int]*verdict.Fault{
		400: {Message: "The model `m` does not exist."}, // a status of another meaning
		404: {Type: "NotFoundError", Param: "tool", Message: "Tool with id 'r' not found."},
		422: nil, 409: {}, 403: nil,
	} {
		assert.Equal(t, verdict.ScopeRequest, verdict.ScopeOf(status, said), status)
	}
	for _, r := range verdict.Refusals {
		said := &verdict.Fault{Message: r.Message + " x " + r.Holds}
		for _, member := range []struct {
			to   *any
			text string
		}{{&said.Type, r.Type}, {&said.Param, r.Param}, {&said.Code, r.Code}} {
			if member.text != "" {
				*member.to = member.text
			}
		}
		assert.Equal(t, r.Scope, verdict.ScopeOf(r.Status, said), "%+v", r)
	}
}
