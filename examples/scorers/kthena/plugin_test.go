// SPDX-License-Identifier: Apache-2.0

package kthena

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/pdflow/decide"
)

var _ ScorePlugin = (*plugin)(nil)

func TestThePodWithTheEarliestFirstTokenHasTheBestScore(t *testing.T) {
	idle, busy := &PodInfo{0, 1, 0.1}, &PodInfo{0, 60, 0.8}
	behind, conversation := &PodInfo{4, 8, 0.3}, &PodInfo{0, 8, 0.3}
	p := &plugin{policy: decide.Predicted(decide.PredictedOptions{}),
		speed:    decide.Speed{Base: 6.83e-3, PerRequest: 4.42e-6, PerContext: 76.2e-9, PerPrompt: 31.4e-6},
		kvTokens: 400_000, prompt: func(*Context) int { return 4000 },
		cached: func(_ *Context, pod *PodInfo) int {
			if pod == conversation {
				return 3900
			}
			return 0
		}}
	scores := p.Score(&Context{}, []*PodInfo{idle, busy, behind, conversation})
	assert.Equal(t, 100, scores[conversation])
	assert.Greater(t, scores[idle], scores[busy])
	assert.Greater(t, scores[busy], scores[behind])
	assert.Positive(t, scores[behind])
	assert.Empty(t, p.Score(&Context{}, nil))
	p.speed = decide.Speed{}
	assert.Empty(t, p.Score(&Context{}, []*PodInfo{idle}), "nothing is predicted, and other plugins decide")
}
