// SPDX-License-Identifier: Apache-2.0

package verdict_test

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/request"
	"github.com/pdkit/pdkit/internal/verdict"
)

// Of all that real engines were recorded to answer, only the response of a terminated one ends with a failure.
func TestRecordedEndings(t *testing.T) {
	files, err := filepath.Glob("../../docs/protocols/recordings/*/*.json")
	require.NoError(t, err)
	failed, read := map[string]bool{}, 0
	for _, file := range files {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		var scenario struct {
			Exchanges []struct {
				Request struct {
					Path string `json:"path"`
				} `json:"request"`
				Response struct {
					Status int             `json:"status"`
					Body   json.RawMessage `json:"body"`
					Lines  []string        `json:"sse_lines"`
				} `json:"response"`
			} `json:"exchanges"`
		}
		require.NoError(t, json.Unmarshal(data, &scenario), file)
		for _, x := range scenario.Exchanges {
			api := request.APIOf(x.Request.Path)
			if api == request.Unknown || x.Response.Status != http.StatusOK {
				continue
			}
			read++
			guarded, tail := api.Info().Guarded, verdict.NewTail(true, "")
			fails := len(x.Response.Lines) == 0 && verdict.WholeFailed(x.Response.Body, guarded, "", false)
			for _, line := range x.Response.Lines {
				data, _ := strings.CutPrefix(line, "data: ")
				fails = fails || guarded && tail.GaveUp([]byte(data)) >= 0 ||
					!guarded && verdict.EndsFailed([]byte(data))
			}
			if fails {
				failed[filepath.Base(file)] = true
			}
		}
	}
	assert.Greater(t, read, 50)
	assert.Equal(t, map[string]bool{"55b-D-terminated-while-streaming.json": true}, failed)
}
