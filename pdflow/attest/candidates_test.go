// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// teller tells all candidates that are not to be avoided.
type teller struct{ pdflow.Picker }

func (teller) Candidates(in *pdflow.PickInput, c *pick.Candidates) (tells bool) {
	for _, id := range []string{"p0", "p1", "p2"} {
		if !in.Avoids(id) {
			c.Prefill = append(c.Prefill, pick.Candidate{Endpoint: &discovery.Endpoint{ID: id}})
		}
	}
	for _, id := range []string{"d0", "d1"} {
		c.Decode = append(c.Decode, pick.Candidate{Endpoint: &discovery.Endpoint{ID: id}})
	}
	return true
}

func TestWhatCorruptsKVIsNoCandidate(t *testing.T) {
	q := NewQuarantine(teller{})
	q.set([]Finding{{Suspect: Suspect{Prefill: "p1"}}, {Suspect: Suspect{Prefill: "p2", Decode: "d1"}}})
	var c pick.Candidates
	assert.True(t, q.Candidates(&pdflow.PickInput{}, &c))
	assert.Len(t, c.Prefill, 2, "without p1")
	assert.Zero(t, c.Decode[0].Apart)
	assert.Equal(t, uint64(0b10), c.Decode[1].Apart, "d1 with p2, which is the second of those that are left")
	assert.False(t, NewQuarantine(pick.Func(nil)).Candidates(&pdflow.PickInput{}, &c), "the inner picker does not tell")
}

// asking is a picker that has to ask about requests, and picks one pair that is bad.
type asking struct {
	pdflow.Picker
	prepared, unprepared int
}

func (a *asking) Prepare(_ context.Context, in *pdflow.PickInput) *pdflow.PickInput {
	a.prepared++
	out := *in
	out.Prompt = &pdflow.Prompt{}
	return &out
}

func (a *asking) Pick(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	if in.Prompt == nil {
		a.unprepared++
	}
	return pdflow.Pick{Prefill: discovery.Endpoint{ID: "p"}, Decode: discovery.Endpoint{ID: "d"}}, nil
}

func TestWhatIsPickedSeveralTimesIsPreparedOnce(t *testing.T) {
	inner := &asking{}
	q := NewQuarantine(inner)
	q.set([]Finding{{Suspect: Suspect{Prefill: "p", Decode: "d"}}})
	_, err := q.Pick(t.Context(), &pdflow.PickInput{})
	assert.NoError(t, err)
	assert.Equal(t, [2]int{1, 0}, [2]int{inner.prepared, inner.unprepared})
}
