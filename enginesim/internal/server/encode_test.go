// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func encodeScene(t *testing.T) (s *simtest.Scene, e *enginesim.Engine) {
	t.Helper()
	s = simtest.New(t, func(p, _ *enginesim.Config) { p.Extra = map[string]string{"ec_role": "ec_consumer"} })
	e, err := enginesim.Start(enginesim.Config{Extra: map[string]string{"ec_role": "ec_producer"}})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, e.Close()) })
	return s, e
}

func picture(name string) simtest.Obj {
	return simtest.Obj{"model": "tiny",
		"messages": []simtest.Obj{{"role": "user", "content": []simtest.Obj{{"type": "text", "text": "what?"},
			{"type": "image_url", "image_url": simtest.Obj{"url": name}}}}}, "max_tokens": 4, "temperature": 0}
}

func TestMediaArePartOfThePrompt(t *testing.T) {
	s, _ := encodeScene(t)
	assert.NotEqual(t, s.Alone(picture("cat")), s.Alone(picture("dog")))
	assert.Equal(t, s.Alone(picture("cat")), s.Alone(picture("cat")))
}

func TestAConsumerTakesOverWhatItsParametersName(t *testing.T) {
	s, e := encodeScene(t)
	a := s.Ask(e, picture("cat"))
	require.Equal(t, 200, a.Status, a.Body)
	var params simtest.Obj
	require.NoError(t, json.Unmarshal([]byte(a.Get("ec_transfer_params").Raw), &params))
	require.Len(t, params, 1)
	assert.EqualValues(t, 1, e.Stats().MediaEncoded)

	s.Ask(s.P, simtest.With(picture("cat"), simtest.Obj{"ec_transfer_params": params}))
	assert.EqualValues(t, 1, s.P.Stats().MediaLoaded)
	assert.Zero(t, s.P.Stats().MediaComputed)
	s.Ask(s.P, picture("cat"))
	assert.EqualValues(t, 1, s.P.Stats().MediaComputed, "without parameters it encodes itself")
	s.Ask(s.P, simtest.With(picture("dog"), simtest.Obj{"ec_transfer_params": params}))
	assert.EqualValues(t, 2, s.P.Stats().MediaComputed, "they are another picture's")
	assert.Equal(t, "null", s.Ask(s.O, picture("cat")).Get("ec_transfer_params").Raw)
}
