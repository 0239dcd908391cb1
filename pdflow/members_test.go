// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	_ "github.com/pdkit/pdkit/connector/sglang"
	"github.com/pdkit/pdkit/pdflow"
)

// ticketed declares members of its own.
type ticketed struct{ fake }

func (t *ticketed) Traits() connector.Traits {
	return connector.Traits{Name: "ticketed", Order: t.order,
		Members: []string{"kv_ticket", "sampling_params.extra.ticket"}}
}

// bodies keeps what engines were asked.
type bodies struct {
	mu   sync.Mutex
	list []string
}

func (b *bodies) answer(h handler) handler {
	return func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		b.mu.Lock()
		b.list = append(b.list, body)
		b.mu.Unlock()
		h(x, w, r, body)
	}
}

// A client's own transfer members reach no engine, however the request is served.
func TestMembersOfTheConnectorAreStrippedInEveryMode(t *testing.T) {
	const stolen = `"kv_ticket":"stolen","vllm_xargs":{"\u006bv_ticket":"stolen"},` +
		`"sampling_params":{"extra":{"ticket":"stolen"},"extra_args":{"kv_ticket":"stolen"}},` +
		`"kv_transfer_params":"stolen"`
	together := &ticketed{fake{order: connector.Together}}
	sglang, err := connector.Open(config.Spec{Type: "sglang"})
	require.NoError(t, err)
	for name, k := range map[string]struct {
		conn connector.KVConnector
		p    handler
		more string // of the client's request
		mode string
		opts func() []pdflow.Option
	}{
		"disaggregated": {conn: &ticketed{}, p: answer(ok), mode: "disaggregated"},
		"together":      {conn: together, p: answer(ok), mode: "disaggregated"},
		"aggregated":    {conn: &ticketed{}, p: answer(ok), more: `"n":2,`, mode: "aggregated"},
		"decode fallback": {conn: &ticketed{}, p: status(500), mode: "fallback", opts: func() []pdflow.Option {
			return []pdflow.Option{pdflow.WithFallback(config.FallbackDecode)}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			seen := &bodies{}
			var opts []pdflow.Option
			if k.opts != nil {
				opts = k.opts()
			}
			x := script(t, k.conn, seen.answer(k.p), seen.answer(answer(ok)), opts...)
			r := post(t, x.url, "/v1/completions", completion("a", k.more+stolen))
			require.Equal(t, 200, r.status, r.body)
			require.Equal(t, k.mode, r.header.Get("X-PD-Mode"))
			require.NotEmpty(t, seen.list)
			for _, body := range seen.list {
				require.NotContains(t, body, "stolen")
			}
		})
	}

	t.Run("an engine alone that the caller has chosen", func(t *testing.T) {
		seen := &bodies{}
		x := script(t, &ticketed{}, answer(ok), seen.answer(answer(ok)))
		resp, err := x.flow.Do(
			t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", stolen)),
				Pick: &pdflow.Pick{Decode: x.pair.Decode}},
		)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Len(t, seen.list, 1)
		require.NotContains(t, seen.list[0], "stolen")
	})

	t.Run("a flow's fallback, whose members the first does not know", func(t *testing.T) {
		seen := &bodies{}
		next := script(t, &ticketed{}, seen.answer(answer(ok)), seen.answer(answer(ok)))
		x := script(t, &fake{}, status(500), answer(ok), pdflow.WithFallback(config.FallbackConnector, next.flow))
		r := post(t, x.url, "/v1/completions", completion("a", stolen))
		require.Equal(t, "fallback", r.header.Get("X-PD-Mode"))
		require.Len(t, seen.list, 2)
		for _, body := range seen.list {
			require.NotContains(t, body, "stolen")
		}
	})

	t.Run("SGLang's, by one engine", func(t *testing.T) {
		seen := &bodies{}
		x := script(t, sglang, answer(ok), seen.answer(answer(ok)))
		resp, err := x.flow.Do(
			t.Context(), &pdflow.Request{API: connector.APICompletions, Pick: &pdflow.Pick{Decode: x.pair.Decode},
				AnyPair: true,
				Body: []byte(completion("a", `"data_parallel_rank":1,"routed_dp_rank":1,"disagg_prefill_dp_rank":1,`+
					`"bootstrap_room":1,"rid":""`))})
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.JSONEq(t, completion("a", ""), seen.list[0])
	})

	t.Run("an object of which engines read different members is refused", func(t *testing.T) {
		x := script(t, &ticketed{}, answer(ok), answer(ok))
		r := post(t, x.url, "/v1/completions", completion("a", `"sampling_params":{"extra":{"ticket":1,"ticket":2}}`))
		require.Equal(t, 400, r.status)
		require.Empty(t, x.all())
	})
}

// What leaves no place for a nested member is refused before P holds KV for it.
func TestAClientsValueInTheConnectorsPlaceIsRefusedFirst(t *testing.T) {
	x := script(t, &ticketed{}, answer(ok), answer(ok))
	for body, param := range map[string]string{
		`{"prompt":"a","sampling_params":{"extra":5}}`:              "sampling_params.extra",
		`{"prompt":"a","sampling_params":{"extra":{"x":1,"x":2}}}`:  "sampling_params.extra.x",
		`{"prompt":"a","sampling_params":{"extra":"ticket"},"n":2}`: "sampling_params.extra",
	} {
		r := post(t, x.url, "/v1/completions", body)
		require.Equal(t, 400, r.status, r.body)
		require.Contains(t, r.body, `"param":"`+param+`"`)
	}
	require.Empty(t, x.all(), "no engine was asked")
}

// headed has its handoff in a header.
type headed struct{ fake }

func (h *headed) Traits() connector.Traits {
	return connector.Traits{Name: "headed", Handoff: connector.Handoff{Header: "X-Kv-Ticket"}}
}

// A client's own handoff reaches no engine either where it is a header and the host forwards headers of that name.
func TestAClientsOwnHeaderOfTheHandoffIsNotForwarded(t *testing.T) {
	seen := func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		require.Empty(t, r.Header["X-Kv-Ticket"])
		require.Equal(t, []string{"t"}, r.Header["X-Tenant"])
		answer(ok)(x, w, r, body)
	}
	x := script(t, &headed{}, seen, seen, pdflow.WithForwardHeaders("x-kv-ticket", "X-Tenant"))
	for body, legs := range map[string]string{`{"prompt":"a"}`: "P D", `{"prompt":"a","n":2}`: "D"} {
		x.events = nil
		r := post(t, x.url, "/v1/completions", body, "X-KV-Ticket", "stolen", "X-Tenant", "t")
		require.Equal(t, 200, r.status, r.body)
		require.Equal(t, legs, x.all())
	}
}
