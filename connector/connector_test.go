// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector"
)

// Both legs of a pair that are sent together read P's response, and a Rewriter does so beside them.
func TestAPrefillResultMayBeReadByManyAtOnce(t *testing.T) {
	p := &connector.PrefillResult{Body: []byte(`{"a":1,"b":null}`)}
	var readers sync.WaitGroup
	for range 8 {
		readers.Go(func() {
			raw, ok := p.Field("a")
			assert.True(t, ok)
			assert.Equal(t, "1", string(raw))
			assert.NoError(t, p.Err())
		})
	}
	readers.Wait()
	_, ok := (&connector.PrefillResult{Body: []byte(`{"a":1`)}).Field("a")
	assert.False(t, ok, "nothing is found in a body that is malformed")
}
