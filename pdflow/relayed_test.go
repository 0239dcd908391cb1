// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
)

// relays begins a request, and returns it when decode has answered with a status and the caller relays its response.
func relays(t *testing.T, x *givenUp, more string, status int) (*pdflow.Steps, *pdflow.Step, *fakeFleet) {
	t.Helper()
	f := newFakeFleet(t, &fake{more: withSGLang}, "p0 d0", config.Retry{MaxAttempts: 1},
		func(string, int) response { return whole(x.good) })
	s, err := f.flow.Begin(t.Context(), &pdflow.Request{API: x.api, Body: []byte(x.body + more + "}")})
	require.NoError(t, err)
	t.Cleanup(func() { s.End(nil) })
	decode, _, err := s.Next(t.Context())
	require.NoError(t, err)
	if decode.Leg == pdflow.LegPrefill {
		decode.Send(f)
		decode, _, err = s.Next(t.Context())
		require.NoError(t, err)
	}
	_, err = decode.Take()
	require.NoError(t, err)
	require.NoError(t, decode.Passed([]byte(x.failed), true), "nothing is relayed yet")
	require.NoError(t, decode.Relay(status))
	_, _, err = s.Next(t.Context())
	require.NoError(t, err)
	return s, decode, f
}

// passes tells of a response in pieces of that many bytes, and returns the first error.
func passes(step *pdflow.Step, response string, size int) error {
	for len(response) > size {
		if err := step.Passed([]byte(response[:size]), false); err != nil {
			return err
		}
		response = response[size:]
	}
	return step.Passed([]byte(response), true)
}

// What a host relays is judged as what a flow reads: an end that is an error counts as one, whatever End is told.
func TestAnEndOfARelayedResponseThatIsAnErrorIsAFailure(t *testing.T) {
	for name, x := range givenUps {
		stream := x.first + x.token
		for what, c := range map[string]struct {
			more, response string
			fails          bool
		}{
			"a whole response":              {"", x.whole, true},
			"a good one":                    {"", x.good, false},
			"a stream":                      {`,"stream":true`, stream + x.failed, true},
			"a stream without a token":      {`,"stream":true`, x.first + x.failed, true},
			"a stream so far":               {`,"stream":true`, stream, false},
			"an error within a stream":      {`,"stream":true`, stream + chunk(`{"error":{"message":"x"}}`), true},
			"an error that is named so":     {`,"stream":true`, stream + typed("error", `{"message":"x"}`), true},
			"an error in place of a stream": {`,"stream":true`, chunk(`{"error":{"message":"x"}}`), true},
			"one whose last event lacks its end": {`,"stream":true`,
				stream + strings.TrimSpace(chunk(`{"error":{"message":"x"}}`)), true},
			"a whole one in place of a stream": {`,"stream":true`, x.whole, true},
			"a good one in place of a stream":  {`,"stream":true`, x.good, false},
			"behind a long event": {`,"stream":true`,
				chunk(`{"a":"`+strings.Repeat("x", 1<<20)+`"}`) + x.failed, true},
			"a text that holds the words of an end": {`,"stream":true`,
				stream + chunk(`{"a":"\"finish_reason\":\"abort\""}`), false},
		} {
			for _, size := range []int{1, 7, 1 << 22} {
				if size == 1 && len(c.response) > 1<<16 {
					continue
				}
				s, step, f := relays(t, &x, c.more, 200)
				err := passes(step, c.response, size)
				s.End(nil)
				got := f.seen.list()[0].Err
				if !c.fails {
					require.NoError(t, err, "%s, %s", name, what)
					require.Nil(t, got, "%s, %s", name, what)
					continue
				}
				require.ErrorIs(t, err, pdflow.CodeStreamBroken, "%s, %s, %d", name, what, size)
				require.Equal(t, pdflow.CodeStreamBroken, codeOf(got), "%s, %s", name, what)
				assert.True(t, got.EngineFault())
			}
		}
	}
}

func TestWhatARelayedResponseSaysIsTheEngines(t *testing.T) {
	x := givenUps["chat"]
	for end, err := range map[string]error{"the client left": context.Canceled, "nothing": nil} {
		s, step, f := relays(t, &x, `,"stream":true`, 200)
		require.Error(t, passes(step, x.token+x.failed, 1<<20))
		require.Error(t, step.Passed(nil, true), "it stays so")
		s.End(err)
		assert.Equal(t, pdflow.CodeStreamBroken, codeOf(f.seen.list()[0].Err), end)
	}
	s, step, f := relays(t, &x, "", 500)
	require.NoError(t, passes(step, `{"choices":[{"finish_reason":"abort"}]}`, 9), "its status says it")
	s.End(nil)
	assert.Equal(t, pdflow.CodeDecodeFailed, codeOf(f.seen.list()[0].Err))

	r := givenUps["responses"]
	s, step, f = relays(t, &r, `,"background":true`, 200)
	require.NoError(t, passes(step, r.whole, 9), "its client may have cancelled it")
	s.End(nil)
	assert.Nil(t, f.seen.list()[0].Err)
}
