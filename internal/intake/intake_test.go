// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOnlyPlainJSONMayComeIn(t *testing.T) {
	for _, good := range []string{"application/json", "Application/JSON; charset=utf-8", "application/json; charset"} {
		assert.Nil(t, checkHeader(http.Header{"Content-Type": {good}}), good)
	}
	for _, bad := range [][]string{nil, {""}, {"text/plain"}, {"application/json", "application/json"},
		{"application/jsonl"}, {"multipart/form-data; boundary=x"}} {
		fault := checkHeader(http.Header{"Content-Type": bad})
		require.NotNil(t, fault, bad)
		assert.Contains(t, fault.Message, "Content-Type", bad)
	}
	for encoding, fault := range map[string]bool{"": false, "Identity": false, "gzip": true, "identity, gzip": true} {
		h := http.Header{"Content-Type": {"application/json"}, "Content-Encoding": {encoding}}
		assert.Equal(t, fault, checkHeader(h) != nil, encoding)
	}
}
