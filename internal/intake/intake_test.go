// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestOnlyPlainJSONMayComeIn(t *testing.T) {
	for _, good := range []string{"application/json", "Application/JSON; charset=utf-8", "application/json; charset"} {
		assert.Empty(t, CheckHeader(http.Header{"Content-Type": {good}}), good)
	}
	for _, bad := range [][]string{nil, {""}, {"text/plain"}, {"application/json", "application/json"},
		{"application/jsonl"}, {"multipart/form-data; boundary=x"}} {
		assert.Contains(t, CheckHeader(http.Header{"Content-Type": bad}), "Content-Type", bad)
	}
	for encoding, fault := range map[string]bool{"": false, "Identity": false, "gzip": true, "identity, gzip": true} {
		h := http.Header{"Content-Type": {"application/json"}, "Content-Encoding": {encoding}}
		assert.Equal(t, fault, CheckHeader(h) != "", encoding)
	}
}
