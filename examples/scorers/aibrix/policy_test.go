// SPDX-License-Identifier: Apache-2.0

package aibrix

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/decide"
)

var (
	_ PrefillScorePolicy = (*prefillPolicy)(nil)
	_ PrefillScorer      = (*prefillScorer)(nil)
	_ DecodeScorePolicy  = (*decodePolicy)(nil)
)

var speed = decide.Speed{Base: 6.83e-3, PerRequest: 4.42e-6, PerContext: 76.2e-9, PerPrompt: 31.4e-6}

func TestThePrefillPodWithTheEarliestFirstTokenHasTheLowestScore(t *testing.T) {
	p := &prefillPolicy{decide.Predicted(decide.PredictedOptions{}), speed, func(_, _, pod string) int {
		return map[string]int{"cached": 900}[pod]
	}}
	s, err := p.Prepare(&RoutingContext{Model: "m", Message: strings.Repeat("word", 1000)}, nil, nil)
	require.NoError(t, err)
	idle, cached := s.ScorePod(&Pod{"idle"}, 0, 1), s.ScorePod(&Pod{"cached"}, 0, 1)
	assert.InDelta(t, 6.83+31.4, idle, 0.01, "milliseconds: a step, and a thousand tokens")
	assert.Less(t, cached, idle)
	assert.Greater(t, s.ScorePod(&Pod{"cached"}, 2, 2), idle)
}

func TestTheDecodePodWithTheShortestStepHasTheLowestScore(t *testing.T) {
	p := &decodePolicy{decide.Predicted(decide.PredictedOptions{}), speed}
	r := &RoutingContext{Message: strings.Repeat("word", 1000)}
	few := p.ScoreDecodePod(r, &Pod{"d0"}, DecodePodInput{RunningReqs: 4, FreeGPUPercent: 90, DecodeTokens: 8000})
	many := p.ScoreDecodePod(r, &Pod{"d1"}, DecodePodInput{RunningReqs: 64, FreeGPUPercent: 40, DecodeTokens: 128_000})
	full := p.ScoreDecodePod(r, &Pod{"d2"}, DecodePodInput{RunningReqs: 4, FreeGPUPercent: 1, DecodeTokens: 8000})
	assert.Less(t, few, many)
	assert.Less(t, many, full)
	assert.Contains(t, p.Describe(), string(p.Name()))
}
