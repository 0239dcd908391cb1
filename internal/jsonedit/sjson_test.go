// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/sjson"
)

// What doc.go says of sjson. When a release of it changes one of these, doc.go changes, too.
func TestSjsonIsSilentWhereAClientCouldCheat(t *testing.T) {
	set := func(path, raw string) func(string) (string, error) {
		return func(body string) (string, error) { return sjson.SetRaw(body, path, raw) }
	}
	for name, c := range map[string]struct {
		body, want string
		edit       func(string) (string, error)
	}{
		"a second member of the same name is left, and counts in Python": {
			`{"stream":true,"stream":true}`, `{"stream":false,"stream":true}`, set("stream", "false"),
		},
		"a second one survives the removal of the first": {
			`{"kv":1,"kv":2}`, `{"kv":2}`, func(body string) (string, error) { return sjson.Delete(body, "kv") },
		},
		"text after the body is dropped, and the body accepted": {`{"a":1}trailing`, `{"a":1,"k":2}`, set("k", "2")},
		"a body that is no object becomes one":                  {`null`, `{"k":2}`, set("k", "2")},
		"a broken body stays broken":                            {`{"a":tru}`, `{"a":tru,"k":2}`, set("k", "2")},
		"a name with a pipe changes nothing":                    {`{"a":1}`, `{"a":1}`, set("a|b", "2")},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := c.edit(c.body)
			require.NoError(t, err)
			assert.Equal(t, c.want, got)
		})
	}
	for _, body := range []string{`{"stream":true,"stream":true}`, `{"a":1}trailing`, `null`, `{"a":tru}`} {
		_, err := Parse([]byte(body))
		assert.Error(t, err, "here: %s", body)
	}
}
