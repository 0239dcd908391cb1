// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func encodeScene(t *testing.T) (s *scene, e *enginesim.Engine) {
	t.Helper()
	s = newScene(t, func(p, _ *enginesim.Config) { p.Extra = map[string]string{"ec_role": "ec_consumer"} })
	e, err := enginesim.Start(enginesim.Config{Extra: map[string]string{"ec_role": "ec_producer"}})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, e.Close()) })
	return s, e
}

func picture(name string) obj {
	return obj{"model": "tiny", "messages": []obj{{"role": "user", "content": []obj{{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": obj{"url": name}}}}}, "max_tokens": 4, "temperature": 0}
}

func TestMediaArePartOfThePrompt(t *testing.T) {
	s, _ := encodeScene(t)
	assert.NotEqual(t, s.alone(chat, picture("cat")), s.alone(chat, picture("dog")))
	assert.Equal(t, s.alone(chat, picture("cat")), s.alone(chat, picture("cat")))
}

func TestAConsumerTakesOverWhatItsParametersName(t *testing.T) {
	s, e := encodeScene(t)
	a := s.post(t.Context(), e, chat, picture("cat"))
	require.Equal(t, 200, a.status, a.body)
	var params obj
	require.NoError(t, json.Unmarshal([]byte(a.get("ec_transfer_params").Raw), &params))
	require.Len(t, params, 1)
	assert.EqualValues(t, 1, e.Stats().MediaEncoded)

	s.post(t.Context(), s.p, chat, with(picture("cat"), obj{"ec_transfer_params": params}))
	assert.EqualValues(t, 1, s.p.Stats().MediaLoaded)
	assert.Zero(t, s.p.Stats().MediaComputed)
	s.post(t.Context(), s.p, chat, picture("cat"))
	assert.EqualValues(t, 1, s.p.Stats().MediaComputed, "without parameters it encodes itself")
	s.post(t.Context(), s.p, chat, with(picture("dog"), obj{"ec_transfer_params": params}))
	assert.EqualValues(t, 2, s.p.Stats().MediaComputed, "they are another picture's")
	assert.Equal(t, "null", s.post(t.Context(), s.o, chat, picture("cat")).get("ec_transfer_params").Raw)
}
