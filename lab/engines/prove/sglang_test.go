// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/lab/internal/apis"
)

// answered is a whole response.
func answered(status int, text string, promptTokens int) *response {
	return &response{status: status, Said: &apis.Said{Texts: map[int]string{0: text}, Whole: true,
		PromptTokens: promptTokens}}
}

func reply(mode string, promptTokens int) *response {
	a := answered(200, "a", promptTokens)
	a.mode = mode
	return a
}

func TestAResponseThatIsNotThatOfOneEngineDiffers(t *testing.T) {
	one := answered(200, "text", 9)
	require.Empty(t, answered(200, "text", 9).differs(one))
	for what, spoil := range map[string]func(*response){
		"another text":            func(a *response) { a.Texts[0] = "texts" },
		"a prompt less":           func(a *response) { a.PromptTokens = 8 },
		"a status":                func(a *response) { a.status = 500 },
		"a cut":                   func(a *response) { a.Whole = false },
		"an error":                func(a *response) { a.Err = errDifferent },
		"other log probabilities": func(a *response) { a.Logprobs = map[int][]float64{0: {-1}} },
	} {
		a := answered(200, "text", 9)
		spoil(a)
		require.NotEmpty(t, a.differs(one), what)
	}
}

func TestASGLangRowProvesNothingUnlessDecodeTookOverThePrompt(t *testing.T) {
	good := row{response: reply("disaggregated", 10), tokens: 10, bytes: 99, wantBytes: 99}
	require.Empty(t, sglangProblem(good))
	for what, spoil := range map[string]func(*row){
		"another text":   func(r *row) { r.wrong = "another text" },
		"one engine":     func(r *row) { r.response = reply("aggregated", 10) },
		"computed again": func(r *row) { r.tokens = 0 },
		"not moved":      func(r *row) { r.bytes = 0 },
		"no prompt":      func(r *row) { r.response = reply("disaggregated", 0) },
	} {
		one := good
		spoil(&one)
		require.NotEmpty(t, sglangProblem(one), what)
	}
}
