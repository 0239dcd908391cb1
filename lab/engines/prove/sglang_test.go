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
	good := sglangRow{reply: reply("disaggregated", 10), taken: 10,
		moved: 10 * sglangTokenBytes}
	require.Empty(t, good.problem())
	for what, spoil := range map[string]func(*sglangRow){
		"another text":   func(r *sglangRow) { r.wrong = "another text" },
		"one engine":     func(r *sglangRow) { r.reply = reply("aggregated", 10) },
		"computed again": func(r *sglangRow) { r.taken = 0 },
		"not moved":      func(r *sglangRow) { r.moved = 0 },
		"no prompt":      func(r *sglangRow) { r.reply = reply("disaggregated", 0) },
	} {
		row := good
		spoil(&row)
		require.NotEmpty(t, row.problem(), what)
	}
}
