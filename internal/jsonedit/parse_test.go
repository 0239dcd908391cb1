// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestSmoke(t *testing.T) {
	d, err := Parse([]byte(` {"a" : 1, "messages":[{"role":"user","content":"h\"}]i"}],"str\u0065am":true } `))
	require.NoError(t, err)
	var s Segments
	d.Splice([]Edit{{Name: "stream", Value: []byte("false")}, {Name: "a", Delete: true}, {Name: "z", Value: []byte("{}")}}, &s)
	assert.Equal(t, ` {"messages":[{"role":"user","content":"h\"}]i"}],"str\u0065am":false,"z":{} } `, string(s.AppendTo(nil)))
	_, err = Parse([]byte(`{"stream":1,"str\u0065am":2}`))
	require.Error(t, err)
	t.Log(err)
	assert.NotContains(t, err.Error(), strings.Repeat("x", 3))
}
