// SPDX-License-Identifier: Apache-2.0

package contract_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
)

func parse(t testing.TB, api connector.API, body string) *connector.ClientRequest {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return r
}

func TestWithout(t *testing.T) {
	for _, k := range []struct{ rule, members, body, want string }{
		{"a member", "kv_ticket", `{"prompt":"x","kv_ticket":"t"}`, `{"prompt":"x"}`},
		{"whose name is escaped", "kv_ticket", `{"prompt":"x","\u006bv_ticket":"t"}`, `{"prompt":"x"}`},
		{"in the objects where engines read it again", "kv_ticket",
			`{"prompt":"x","vllm_xargs":{"kv_ticket":1,"a":1},"sampling_params":{"extra_args":{"b":1,` +
				`"\u006bv_ticket":1}}}`,
			`{"prompt":"x","vllm_xargs":{"a":1},"sampling_params":{"extra_args":{"b":1}}}`},
		{"there and in what is inside", "kv_ticket", `{"vllm_xargs":{"kv_ticket":1,"extra_args":{"kv_ticket":2,` +
			`"b":1}}}`, `{"vllm_xargs":{"extra_args":{"b":1}}}`},
		{"not where nothing reads it", "kv_ticket", `{"metadata":{"kv_ticket":1},"vllm_xargs":[{"kv_ticket":1}]}`,
			`{"metadata":{"kv_ticket":1},"vllm_xargs":[{"kv_ticket":1}]}`},
		{"a path", "sampling_params.extra.ticket", `{"sampling_params":{"n":1,"extra":{"ticket":1,"c":2}}}`,
			`{"sampling_params":{"n":1,"extra":{"c":2}}}`},
		{"a path only", "sampling_params.extra.ticket",
			`{"ticket":1,"extra":{"ticket":1},"sampling_params":{"ticket":1,"extra":null}}`,
			`{"ticket":1,"extra":{"ticket":1},"sampling_params":{"ticket":1,"extra":null}}`},
		{"two paths in one object", "o.a o.b.c", `{"o":{"a":1,"b":{"c":1}}}`, `{"o":{"b":{}}}`},
		{"an object and a path in it", "o o.b", `{"o":{"b":1},"p":1}`, `{"p":1}`},
		{"beside those that always go", "kv_ticket",
			`{"rid":"","kv_transfer_params":{},"sampling_params":{"kv_transfer_params":{},"kv_ticket":1}}`,
			`{"sampling_params":{}}`},
		{"a value that names it", "kv_ticket", `{"prompt":"kv_ticket","vllm_xargs":{"a":"kv_ticket"}}`,
			`{"prompt":"kv_ticket","vllm_xargs":{"a":"kv_ticket"}}`},
	} {
		r, err := contract.Without(parse(t, connector.APIChat, k.body), strings.Fields(k.members))
		require.NoError(t, err, k.rule)
		got, err := contract.Body(contract.NewLeg(r))
		require.NoError(t, err, k.rule)
		assert.Equal(t, k.want, string(got), k.rule)
		assert.True(t, json.Valid(got))
		assert.Equal(t, k.body, string(r.Body()), "what the client sent stays as it is")
		again, err := contract.Without(r, strings.Fields(k.members))
		require.NoError(t, err)
		assert.Same(t, r, again, "%s: the second time there is nothing to do", k.rule)
	}
	for _, body := range []string{`{"o":{"a":{"b":1,"b":2}}}`, `{"o":{"a":{},"a":{"b":1}}}`, `{"o":{"c":1,"c":2}}`} {
		_, err := contract.Without(parse(t, connector.APIChat, body), []string{"o.a.b"})
		var bad *connector.RequestError
		require.ErrorAs(t, err, &bad, "engines differ in which one they read: %s", body)
	}
	for body, param := range map[string]string{`{"o":7}`: "o", `{"o":"x"}`: "o", `{"o":{"a":[1]}}`: "o.a"} {
		_, err := contract.Without(parse(t, connector.APIChat, body), []string{"o.a.b"})
		var bad *connector.RequestError
		require.ErrorAs(t, err, &bad, "there is no place for the connector's own: %s", body)
		assert.Equal(t, param, bad.Param)
	}
}

func TestWithoutCostsNothingWhereThereIsNothingToStrip(t *testing.T) {
	members := []string{"bootstrap_room", "data_parallel_rank", "a.member.with.a.path.that.is.longer.than.most"}
	for _, body := range []string{`{"prompt":"x","n":1}`,
		`{"vllm_xargs":{"a":1},"sampling_params":{"n":1}}`} {
		r := parse(t, connector.APIChat, body)
		assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = contract.Without(r, members) }), body)
	}
}

func TestADeclarationThatCannotBeKeptToIsRefused(t *testing.T) {
	good := connector.Traits{Name: "ticket", Members: []string{"a.b", "c"}, Handoff: connector.Handoff{Member: "c.d"}}
	require.NoError(t, contract.CheckTraits(&good))
	for want, edit := range map[string]func(*connector.Traits){
		"Name":          func(t *connector.Traits) { t.Name = "" },
		"lower case":    func(t *connector.Traits) { t.Name = "Ticket" },
		`member ""`:     func(t *connector.Traits) { t.Members = append(t.Members, "") },
		`member "a..b"`: func(t *connector.Traits) { t.Members = []string{"a..b"} },
		`member ".n"`:   func(t *connector.Traits) { t.Carries = []string{".n"} },
		`member "c."`:   func(t *connector.Traits) { t.Handoff.Member = "c." },
		"Lease":         func(t *connector.Traits) { t.Handoff.Lease = -1 },
		"timeout":       func(t *connector.Traits) { t.Timeouts.Prefill = -time.Second },
		"MaxAttempts":   func(t *connector.Traits) { t.Retry.MaxAttempts = -1 },
	} {
		bad := good
		bad.Members = slices.Clone(good.Members)
		edit(&bad)
		require.ErrorContains(t, contract.CheckTraits(&bad), want)
	}
}
