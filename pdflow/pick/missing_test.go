// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestWhoLacksAModelIsRememberedForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m missing
		assert.Nil(t, m.engines("a"))
		m.add("p0", "a")
		m.add("p1", "a")
		assert.Equal(t, map[string]bool{"p0": true, "p1": true}, m.engines("a"))
		assert.Nil(t, m.engines("b"), "another model")
		assert.Nil(t, m.engines(""), "a request that names none")
		m.served("a", "p1", "d0")
		assert.Equal(t, map[string]bool{"p0": true}, m.engines("a"))
		m.add("d0", "a")
		assert.Equal(t, map[string]bool{"d0": true}, m.engines("a"), "it had the model: the others are asked again")
		time.Sleep(missingFor)
		assert.Nil(t, m.engines("a"))
	})
}

// Clients name what they like.
func TestTheMemoryOfModelsIsBounded(t *testing.T) {
	var m missing
	for i := range 4 * missingMost {
		m.add("p0", fmt.Sprint("m", i))
	}
	assert.Len(t, m.m, missingMost)
	m.served("never named", "p0")
	assert.Len(t, m.m, missingMost)
	long := strings.Repeat("m", missingName+1)
	m.add("p0", long)
	assert.Nil(t, m.engines(long), "a name may be as long as a body")
}
