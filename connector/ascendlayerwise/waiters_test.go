// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// A settled session is known for a minute more, for the callbacks that D repeats; then its id is forgotten.
func TestSettledSessionsAreForgotten(t *testing.T) {
	l, now := newWaiters(), time.Now()
	l.now = func() time.Time { return now }
	l.settle(l.expect([]string{"a", "a2"}), nil)
	l.expect([]string{"waits"})
	now = now.Add(remembered)
	l.settle(l.expect([]string{"b"}), nil)
	assert.NotNil(t, l.find("a"))
	now = now.Add(time.Second)
	l.settle(l.expect([]string{"c"}), nil)
	assert.Nil(t, l.find("a"))
	assert.Nil(t, l.find("a2"))
	assert.NotNil(t, l.find("b"))
	assert.NotNil(t, l.find("waits"), "however long it takes")
}

func TestSettledSessionsAreBounded(t *testing.T) {
	l := newWaiters()
	for i := range maxRemembers + 10 {
		l.settle(l.expect([]string{strconv.Itoa(i)}), nil)
	}
	assert.Len(t, l.byID, maxRemembers)
	assert.Nil(t, l.find("9"))
	assert.NotNil(t, l.find("10"))
}
