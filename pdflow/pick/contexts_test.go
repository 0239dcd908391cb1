// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Where contexts differ, an engine whose context is surely too short for a request is not picked, if others are there:
// the prompt's token ids are too many for either leg, or the limit of tokens is too large for decode.
func TestAnEngineWithoutRoomForTheRequestIsNotPicked(t *testing.T) {
	const any4 = "p0+d0 p0+d1 p1+d0 p1+d1"
	ids := func(n int) string { return "[" + strings.Repeat("7, ", n-1) + "7]" }
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		f := newFleet(t, ep("p0", prefill, "maxModelLen=100"), ep("d0", decode, "maxModelLen=100"),
			ep("p1", prefill, "maxModelLen=1000"), ep("d1", decode, "maxModelLen=1000"))
		p := pick.New(f.Set, policy, pick.WithBound(1, 0), pick.WithSeed(1))
		for _, k := range []struct {
			rule     string
			api      connector.API
			body     string
			tooShort int
			want     string
			alone    string
		}{
			{"a text", connector.APICompletions, `{"prompt":"hi"}`, 0, any4, "d0 d1"},
			{"a long text", connector.APICompletions, `{"prompt":"` + strings.Repeat("a", 9000) + `"}`, 0, any4,
				"d0 d1"},
			{"ids that fit", connector.APICompletions, `{"prompt":` + ids(100) + `}`, 0, any4, "d0 d1"},
			{"ids", connector.APICompletions, `{"prompt":` + ids(101) + `}`, 0, "p1+d1", "d1"},
			{"ids of generate", connector.APIGenerate, `{"token_ids":` + ids(101) + `}`, 0, "p1+d1", "d1"},
			{"ids of SGLang", connector.APISGLang, `{"input_ids":` + ids(101) + `}`, 0, "p1+d1", "d1"},
			{"several prompts", connector.APICompletions, `{"prompt":[` + ids(60) + `,` + ids(60) + `]}`, 0, any4,
				"d0 d1"},
			{"a limit that fits", connector.APIChat, `{"max_tokens":100}`, 0, any4, "d0 d1"},
			{"a limit", connector.APIChat, `{"max_tokens":101}`, 0, "p0+d1 p1+d1", "d1"},
			{"a nested limit", connector.APIGenerate, `{"token_ids":[1],"sampling_params":{"max_tokens":101}}`, 0,
				"p0+d1 p1+d1", "d1"},
			{"a limit that nobody has room for", connector.APIChat, `{"max_tokens":1001}`, 0, any4, "d0 d1"},
			{"a text that was too long for one", connector.APIChat, `{"messages":[]}`, 100, "p1+d1", "d1"},
			{"a text that was too long for all", connector.APIChat, `{"messages":[]}`, 1000, any4, "d0 d1"},
		} {
			r, err := connector.ParseRequest(k.api, []byte(k.body))
			require.NoError(t, err)
			seen, alone := map[string]bool{}, map[string]bool{}
			for range 200 {
				in := &pdflow.PickInput{Request: r, TooShort: k.tooShort}
				x := mustPick(t, p, in)
				seen[x.Prefill.ID+"+"+x.Decode.ID] = true
				in.Single = true
				alone[mustPick(t, p, in).Decode.ID] = true
			}
			for got := range seen {
				assert.Contains(t, strings.Fields(k.want), got, k.rule)
			}
			for got := range alone {
				assert.Contains(t, strings.Fields(k.alone), got, k.rule)
			}
		}
	})
}

// An engine whose context is not known may have room for anything, and the last engine is picked whatever is known.
func TestAContextThatIsNotKnownIsNotTooShort(t *testing.T) {
	r, err := connector.ParseRequest(connector.APIChat, []byte(`{"max_tokens":1000000}`))
	require.NoError(t, err)
	f := newFleet(t, ep("p", prefill), ep("d0", decode, "maxModelLen=100"), ep("d1", decode, "maxModelLen=x"))
	p := pick.New(f.Set, pick.RoundRobin())
	for range 10 {
		assert.Equal(t, "d1", mustPick(t, p, &pdflow.PickInput{Request: r}).Decode.ID)
	}
	// One that has failed may have failed just once, and one without room refuses for sure.
	assert.Equal(t, "d1", mustPick(t, p, &pdflow.PickInput{Request: r, Avoid: []string{"d1"}}).Decode.ID)
	f.replace(ep("p", prefill), ep("d0", decode, "maxModelLen=100"))
	assert.Equal(t, "d0", mustPick(t, p, &pdflow.PickInput{Request: r}).Decode.ID)
}

// Engines without room are no candidates either, also after a request that needs more or less.
func TestCandidatesHaveRoom(t *testing.T) {
	f := newFleet(t, ep("p", prefill), ep("d0", decode, "maxModelLen=100"), ep("d1", decode, "maxModelLen=100000"))
	p, ok := pick.New(f.Set, pick.TwoChoices(), pick.WithCandidates()).(interface {
		Candidates(in *pdflow.PickInput, c *pick.Candidates) bool
	})
	require.True(t, ok)
	for tokens, want := range map[int]int{5000: 1, 5: 2} {
		r, err := connector.ParseRequest(connector.APIChat, fmt.Appendf(nil, `{"max_tokens":%d}`, tokens))
		require.NoError(t, err)
		for range 3 {
			var c pick.Candidates
			p.Candidates(&pdflow.PickInput{Request: r}, &c)
			require.Len(t, c.Decode, want)
			if want == 1 {
				assert.Equal(t, "d1", c.Decode[0].Endpoint.ID)
			}
		}
	}
}

// A prefill engine that has room for the prompt may have none for the response.
func TestAPrefillEngineServesAloneWhatItHasRoomFor(t *testing.T) {
	f := newFleet(t, ep("b0", both, "maxModelLen=100"), ep("b1", both, "maxModelLen=100000"))
	p, ok := pick.New(f.Set, pick.TwoChoices(), pick.WithCandidates()).(interface {
		Candidates(in *pdflow.PickInput, c *pick.Candidates) bool
	})
	require.True(t, ok)
	for tokens, want := range map[int]bool{5000: false, 5: true} {
		r, err := connector.ParseRequest(connector.APIChat, fmt.Appendf(nil, `{"max_tokens":%d}`, tokens))
		require.NoError(t, err)
		var c pick.Candidates
		p.Candidates(&pdflow.PickInput{Request: r}, &c)
		found := false
		for _, x := range c.Prefill {
			if x.Endpoint.ID == "b0" {
				found = true
				assert.Equal(t, want, x.Alone, tokens)
			}
		}
		assert.True(t, found, tokens)
	}
}
