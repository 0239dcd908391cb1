// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestTheFileIsYAML(t *testing.T) {
	var f lmcacheFile
	f.Set("b", "x: \"y\" # <&>\n")
	f.Set("a", []int{1, 2})
	f.Set("b", json.RawMessage(`{"k": [true, null]}`))
	f.Set("c", lmcacheGB(1<<29))
	assert.Equal(t, "b: {\"k\":[true,null]}\na: [1,2]\nc: 0.5\n", f.String())
	assert.True(t, f.Has("a"))
	assert.False(t, f.Has("d"))
	f.Set("b", "x: \"y\" # <&>\n")
	assert.Contains(t, f.String(), `b: "x: \"y\" # <&>\n"`)
	assert.Equal(t, "0.0001", lmcacheGB(1).String(), "0 would mean none at all")
	assert.Equal(t, "0", lmcacheGB(0).String())
}
