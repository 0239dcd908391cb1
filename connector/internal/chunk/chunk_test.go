// SPDX-License-Identifier: Apache-2.0

package chunk

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
)

func TestAnEventIsOneLineAndKeepsItsText(t *testing.T) {
	p := &connector.PrefillResult{Status: http.StatusOK, Body: []byte("{\"id\": \"c-1\",\n \"created\": 7}")}
	s := Of(connector.APIChat, p)
	data, err := s.Event(json.RawMessage("{\"delta\":\n {\"content\": \"a < b & c\u2028\"}}"), nil)
	require.NoError(t, err)
	assert.Equal(t, `{"id":"c-1","object":"chat.completion.chunk","created":7,`+
		`"choices":[{"delta":{"content":"a < b & c`+"\u2028"+`"}}]}`, string(data))

	data, err = Of(connector.APICompletions, p).Event(nil, json.RawMessage(`{"n": 1}`))
	require.NoError(t, err)
	assert.Equal(t, `{"id":"c-1","object":"text_completion","created":7,"choices":[],"usage":{"n":1}}`, string(data))

	_, err = s.Event(json.RawMessage(`{`), nil)
	assert.Error(t, err)
}
