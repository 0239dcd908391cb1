// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

func TestAPairThatMeetsAgainCrowdsNobodyOut(t *testing.T) {
	q, d := alone(), &target{slot: &slot{}}
	for id := uint32(1); id <= metMost; id++ {
		for range 10 {
			sticky{}.chosen(q, d, &target{slot: &slot{id: id}})
		}
	}
	met := map[uint32]bool{}
	for i := range d.slot.met {
		met[d.slot.met[i].Load()] = true
	}
	require.Equal(t, map[uint32]bool{1: true, 2: true, 3: true, 4: true}, met)
}

// The picker compares an engine's load with the total load. The totals must be exact even if requests begin and end
// while a new snapshot is taken over.
func TestTotalsFollowLoadsFromSnapshotToSnapshot(t *testing.T) {
	p, replace := pickerOf(t, LeastLoad(), WithSeed(1))
	flows := []*picker{p, p.bind(newPairing(nil, connector.Serving{PairOnly: true}, p.opts)), bound(p, named{"nixl"})}
	var open []func(*pdflow.Outcome)
	for _, n := range []int{5, 9, 4, 300, 2, 6} {
		replace(endpoints("e", n)...)
		for i := range 60 {
			flows[i%3].rebuild()
			x, err := flows[i%3].Pick(t.Context(), &pdflow.PickInput{})
			require.NoError(t, err)
			open = append(open, x.Done)
		}
		for _, done := range open[:len(open)/2] {
			done(&pdflow.Outcome{})
		}
		open = open[len(open)/2:]
		counted(t, flows...)
	}
}

// An engine that has got a picture of a megabyte is not as busy as one that has got as many bytes of text.
func TestAPictureIsNotAsMuchLoadAsItsBytesOfText(t *testing.T) {
	cost := func(kind, value string) [2]int64 {
		part := `{"type":"` + kind + `","` + kind + `":` + value + `}`
		r, err := connector.ParseRequest(connector.APIChat, []byte(
			`{"messages":[{"role":"user","content":[`+part+`]}],"max_tokens":100}`))
		require.NoError(t, err)
		return costOf(r)
	}
	bytes := strings.Repeat("iVBORw0KGgo+", 100_000)
	picture := cost("image_url", `{"url":"data:image/png;base64,`+bytes+`"}`)
	require.Less(t, picture[prefillLeg], int64(2000))
	require.Equal(t, picture[prefillLeg]+100, picture[decodeLeg])
	require.Greater(t, cost("text", `"`+bytes+`"`)[prefillLeg], int64(300_000))
}

// named is a connector of which nothing but its name matters.
type named struct{ name string }

func (n named) Traits() connector.Traits { return connector.Traits{Name: n.name} }
func (named) Prefill(context.Context, *connector.Session, *connector.Leg) error {
	return nil
}

func (named) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}
