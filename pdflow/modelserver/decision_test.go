// SPDX-License-Identifier: Apache-2.0

package modelserver_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

func TestDecision(t *testing.T) {
	speed := decide.Speed{Base: 0.01, PerPrompt: 30e-6}
	in := &decide.Input{Prompt: 300, Exact: true, Class: decide.Class{},
		Prefill: []decide.Candidate{{Speed: speed}},
		Decode:  []decide.Candidate{{Speed: speed, Alone: true, Running: 50}}}
	for decision, want := range map[string]string{
		`{"mode":"never"}`:                                  "decode_alone policy",
		`{"mode":"threshold","minPromptTokens":301}`:        "decode_alone short",
		`{"mode":"threshold","minPromptTokens":300}`:        "undecided ",
		`{"mode":"threshold","uncachedTokens":301}`:         "decode_alone short",
		`{"mode":"predicted"}`:                              "decode_alone faster",
		`{"mode":"predicted","objectives":{"itl":"15ms"}}`:  "split interference",
		`{"mode":"predicted","minPromptTokens":301}`:        "decode_alone short",
		`{"mode":"predicted","objectives":{"ttft":"19ms"}}`: "decode_alone faster",
	} {
		ms := read(t, `{"model":"m","decision":`+decision+`}`)
		policy, o := ms.Decision()
		require.NotNil(t, policy, decision)
		var out decide.Decision
		policy.Decide(in, &out)
		assert.Equal(t, want, out.Action.String()+" "+out.Reason, decision)
		assert.False(t, o.DryRun)
		assert.True(t, ms.Decides())
	}
	for _, decision := range []string{`{}`, `{"mode":"always"}`} {
		ms := read(t, `{"model":"m","decision":`+decision+`}`)
		policy, _ := ms.Decision()
		assert.Nil(t, policy)
		assert.False(t, ms.Decides())
	}
	_, o := read(t, `{"model":"m","decision":{"mode":"never","dryRun":true}}`).Decision()
	assert.True(t, o.DryRun)
	assert.Nil(t, o.Class)
	_, o = read(t, `{"model":"m","decision":{"mode":"predicted"},"admission":{"mode":"adaptive"}}`).Decision()
	assert.True(t, o.Class(nil).Refusable, "a model with admission refuses requests")
	assert.True(t, read(t, `{"model":"m","decision":{"mode":"predicted"}}`).Predicts())
	assert.False(t, read(t, `{"model":"m","decision":{"mode":"predicted","dryRun":true}}`).Predicts())
}

func TestFaultsOfADecision(t *testing.T) {
	for decision, fault := range map[string]string{
		`"mode":"thresold"`:                              "mode: is not a known mode; did you mean threshold?",
		`"mode":false`:                                   "mode: is not a known mode; ",
		`"mode":"threshold"`:                             "has no threshold; ",
		`"mode":"threshold","minPromptTokens":-1`:        "minPromptTokens: is negative; ",
		`"mode":"threshold","uncachedTokens":-1`:         "uncachedTokens: is negative; ",
		`"mode":"predicted","objectives":{"ttft":"-1s"}`: "objectives.ttft: ",
		`"mode":"predicted","objectives":{"ttfb":"1s"}`:  "objectives.ttfb: ",
		`"mode":"threshold","minPromptToken":1`:          "minPromptToken: ",
	} {
		_, err := modelserver.Read(object(`{"model":"m","decision":{` + decision + `}}`))
		require.Error(t, err, decision)
		assert.Regexp(t, `^spec\.decision[.:] ?`+fault, lines(err)[0])
	}
	for spec, note := range map[string]string{
		`"decision":{"minPromptTokens":3}`:               ": its mode is always",
		`"decision":{"mode":"never","uncachedTokens":3}`: ".uncachedTokens: the mode is never",
		`"decision":{"mode":"threshold","minPromptTokens":3,"objectives":{"ttft":"1s"}}`: ".objectives: the mode is " +
			"threshold",
		`"kvConnector":{"type":"sglang"},"decision":{"mode":"never"}`: ": a decode engine of sglang serves no " +
			"request alone",
	} {
		ms := read(t, `{"model":"m",`+spec+`}`)
		require.NotEmpty(t, ms.Notes, spec)
		assert.Contains(t, ms.Notes[len(ms.Notes)-1].Error(), "spec.decision"+note)
	}
	ms := read(t, `{"model":"m","decision":{"mode":"predicted","objectives":{"itl":"40ms"}}}`)
	assert.Equal(t, 40*time.Millisecond, time.Duration(ms.Spec.Decision.Objectives.ITL))
}
