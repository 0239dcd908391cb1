// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// fragile is a connector for engines that some requests kill.
type fragile struct{ fake }

func (*fragile) CheckRequest(r *connector.ClientRequest) error {
	if _, deadly := r.Field("deadly"); deadly {
		return &connector.RequestError{Param: "deadly", Message: "would end the engine"}
	}
	return nil
}

// A request that would kill an engine gets 400, and no engine gets it. This holds for a pair, for one engine that
// serves alone because of another member of the request, and for one engine that the caller has chosen.
func TestARequestThatWouldHarmAnEngineIsNotSent(t *testing.T) {
	for name, more := range map[string]string{
		"two engines":             `"deadly":1`,
		"one engine, by policy":   `"deadly":1,"prompt_logprobs":1`,
		"one engine, by the pick": `"deadly":1,"alone":1`,
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fragile{}, answer(ok), answer(ok))
			in := &pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", more))}
			if name == "one engine, by the pick" {
				in.Pick = &pdflow.Pick{Decode: x.pair.Decode}
			}
			_, err := x.flow.Do(t.Context(), in)
			e := pdflowError(t, err)
			require.Equal(t, pdflow.CodeInvalid, e.Code)
			require.Equal(t, 400, e.HTTPStatus())
			require.Equal(t, "deadly", e.Param)
			require.Empty(t, x.all())
		})
	}
}

// Flows of several connectors may share their engines, so each flow refuses what would harm an engine of any of them.
func TestWhatAnotherConnectorsEnginesCannotTakeIsRefused(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithRequestCheckers(&fragile{}))
	_, err := x.flow.Do(
		t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", `"deadly":1`))},
	)
	require.Equal(t, pdflow.CodeInvalid, pdflowError(t, err).Code)
	require.Empty(t, x.all())
	require.Equal(t, 200, post(t, x.url, "/v1/completions", completion("a", "")).status)
}
