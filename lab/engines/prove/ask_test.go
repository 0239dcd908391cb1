// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/lab/internal/apis"
)

// These are the responses that a client may get for a request whose right text is "right".
func TestAnswersAreJudgedAsAClientSeesThem(t *testing.T) {
	const (
		ri   = "data: {\"choices\":[{\"text\":\"ri\"}]}\n\n"
		ght  = "data: {\"choices\":[{\"text\":\"ght\"}]}\n\n"
		ong  = "data: {\"choices\":[{\"text\":\"ong\"}]}\n\n"
		bad  = "data: {\"error\":{\"message\":\"broken\"}}\n\n"
		done = "data: [DONE]\n\n"
		fail = `{"error":{"message":"broken","type":"x","param":null,"code":"y"}}`
	)
	for name, test := range map[string]struct {
		stream       bool
		status       int
		body         string
		abort        bool
		whole, wrong bool
	}{
		"object":                         {false, 200, `{"choices":[{"text":"right"}]}`, false, true, false},
		"object with another text":       {false, 200, `{"choices":[{"text":"wrong"}]}`, false, true, true},
		"short object":                   {false, 200, `{"choices":[{"text":"ri"}]}`, false, true, true},
		"object that is cut":             {false, 200, `{"choices":[{"te`, true, false, false},
		"error object":                   {false, 502, fail, false, true, false},
		"error without object":           {false, 502, "broken", false, false, true},
		"error object of another shape":  {false, 502, "{}", false, true, true},
		"stream":                         {true, 200, ri + ght + done, false, true, false},
		"stream that is cut":             {true, 200, ri, true, false, false},
		"stream that is cut, wrong text": {true, 200, ri + ong, true, false, true},
		"stream that ends without DONE":  {true, 200, ri + ght, false, false, false},
		"short stream that looks whole":  {true, 200, ri + done, false, true, true},
		"stream with an error in it":     {true, 200, ri + bad + done, false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(test.status)
				_, _ = io.WriteString(w, test.body)
				if test.abort {
					assert.NoError(t, http.NewResponseController(w).Flush())
					panic(http.ErrAbortHandler)
				}
			}))
			defer server.Close()
			a := ask(t.Context(), server.URL, question{api: apis.Completions, stream: test.stream, prompt: "p"}, nil)
			assert.Equal(t, test.status, a.status)
			assert.Equal(t, test.whole, a.Whole)
			assert.True(t, a.Whole || a.Err != nil, "what is not whole has a reason")
			if test.wrong {
				assert.Error(t, wrong(a, "right", false))
			} else {
				assert.NoError(t, wrong(a, "right", false))
			}
		})
	}
}
