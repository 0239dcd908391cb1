// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"encoding/json"
	"errors"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// declared is a connector with the given traits, and with checks of its own if they are set.
type declared struct {
	fake
	traits   connector.Traits
	request  func(*connector.ClientRequest) error
	endpoint func(discovery.Endpoint) error
}

func (d declared) Traits() connector.Traits { return d.traits }

func (d declared) CheckRequest(r *connector.ClientRequest) error {
	if d.request == nil {
		return nil
	}
	return d.request(r)
}

func (d declared) CheckEndpoint(e discovery.Endpoint) error {
	if d.endpoint == nil {
		return nil
	}
	return d.endpoint(e)
}

func TestWhatTwoEnginesCannotCarryFollowsFromTheDeclaration(t *testing.T) {
	for _, k := range []struct {
		rule   string
		traits connector.Traits
		api    connector.API
		body   string
		member string
	}{
		{"all APIs but SGLang's", connector.Traits{}, connector.APIMessages, `{"max_tokens":1}`, ""},
		{"SGLang's is named by its prompt", connector.Traits{}, connector.APISGLang, `{}`, "text"},
		{"or by the protocol's first member", connector.Traits{Members: []string{"kv_ticket", "b"}},
			connector.APISGLang, `{}`, "kv_ticket"},
		{"the APIs that are declared", connector.Traits{APIs: []connector.API{connector.APISGLang}},
			connector.APISGLang, `{}`, ""},
		{"and no others", connector.Traits{APIs: []connector.API{connector.APISGLang}}, connector.APIChat, `{}`,
			"messages"},
		{"a handoff is single use unless it is said", connector.Traits{}, connector.APIChat, `{"n":2}`, "n"},
		{"several choices share one for many", connector.Traits{Handoff: connector.Handoff{MultiUse: true}},
			connector.APIChat, `{"n":2}`, ""},
		{"several prompts", connector.Traits{}, connector.APICompletions,
			`{"prompt":["a","b"],"echo":true,"logprobs":1}`, "prompt"},
		{"what is carried is not in the way", connector.Traits{Carries: []string{"prompt"}}, connector.APICompletions,
			`{"prompt":["a","b"],"echo":true,"logprobs":1}`, "echo"},
	} {
		r := parse(t, k.api, k.body)
		err := (&check.Rules{Traits: k.traits}).Declared(r)
		var u *connector.UnsupportedError
		if k.member == "" {
			assert.NoError(t, err, k.rule)
		} else if assert.ErrorAs(t, err, &u, k.rule) {
			assert.Equal(t, k.member, u.Member, k.rule)
		}
	}
}

func TestAConnectorsOwnReasonsComeBesideItsDeclaration(t *testing.T) {
	refuse := func(*connector.ClientRequest) error {
		return &connector.RequestError{Param: "prompt", Message: "would harm an engine"}
	}
	cannot := func(*connector.ClientRequest) error { return &connector.UnsupportedError{Member: "tools"} }
	several, plain := parse(t, connector.APIChat, `{"n":2}`), parse(t, connector.APIChat, `{}`)

	require.NoError(t, check.Of(declared{}).CheckRequest(plain))
	require.EqualError(t, check.Of(declared{request: refuse}).CheckRequest(several), "prompt: would harm an engine",
		"a refusal goes before all")
	var u *connector.UnsupportedError
	require.ErrorAs(t, check.Of(declared{request: cannot}).CheckRequest(several), &u)
	assert.Equal(t, "n", u.Member)
	require.ErrorAs(t, check.Of(wrapper{inner: declared{request: cannot}}).CheckRequest(plain), &u)
	assert.Equal(t, "tools", u.Member)
}

func TestEntriesAreHeldToTheDeclaration(t *testing.T) {
	c := declared{
		traits: connector.Traits{Attributes: []attr.Required{
			{Name: "kvPort", Role: discovery.RolePrefill, Remedy: "the engine's --kv-port"},
			{Name: "kvHost", Role: discovery.RoleBoth},
		}},
		endpoint: func(discovery.Endpoint) error {
			return errors.Join(&config.FieldError{Path: "attributes.kvPort", Problem: "is odd"},
				&config.FieldError{Path: "attributes.tpSize", Problem: "is odd"})
		},
	}
	faults := func(role discovery.Role, attributes map[string]string) (all []string) {
		for _, fe := range config.FieldErrors(
			check.Of(c).CheckEndpoint(discovery.Endpoint{Role: role, Attributes: attributes}),
		) {
			all = append(all, strings.TrimPrefix(fe.Path, "attributes.")+" "+fe.Problem)
		}
		return all
	}
	assert.Equal(t, []string{"kvPort is missing", "kvHost is missing", "tpSize is odd"},
		faults(discovery.RolePrefill, nil), "one fault of each attribute")
	assert.Equal(t, []string{"kvHost is missing", "kvPort is odd", "tpSize is odd"},
		faults(discovery.RoleDecode, map[string]string{"kvHost": " "}))
	c.endpoint = nil
	assert.Equal(t, []string{"kvPort is missing"}, faults(discovery.RoleBoth, map[string]string{"kvHost": "h"}))
	assert.Empty(t, faults(discovery.RoleEncode, nil))
	c.traits.Serving.PairOnly = true
	assert.Empty(t, faults(discovery.RoleBoth, nil), "it takes part in no pair")
}

// engineOf reads group=a model=m and attributes.
func engineOf(id, told string) discovery.Endpoint {
	e := discovery.Endpoint{ID: id, URL: &url.URL{Scheme: "http", Host: id + ":8000"}, Attributes: map[string]string{}}
	for part := range strings.FieldsSeq(told) {
		switch name, value, _ := strings.Cut(part, "="); name {
		case "group":
			e.Group = value
		case "model":
			e.Model = value
		case "version":
			e.Version = value
		default:
			e.Attributes[name] = value
		}
	}
	return e
}

func TestAGivenPairIsJudgedAsAPickedOne(t *testing.T) {
	c := declared{traits: connector.Traits{
		Name: "nixl", PairRules: []attr.PairRule{attr.Multiple(attr.TPSize)},
		Serving:    connector.Serving{PairOnly: true},
		Attributes: []attr.Required{{Name: "kvPort", Role: discovery.RolePrefill}},
	}}
	for _, k := range []struct{ p, d, by string }{
		{"", "", ""},
		{"tpSize=2", "tpSize=4", ""},
		{"tpSize=3", "tpSize=2", "attributes.tpSize"},
		{"tpSize=3", "", ""},
		{"group=a", "group=b", "group"},
		{"", "group=b", "group"},
		{"model=m", "model=n", "model"},
		{"model=m", "", ""},
		{"version=1", "version=2", "version"},
		{"kvNetwork=ib0", "kvNetwork=roce", "attributes.kvNetwork"},
		{"connector=lmcache", "", "attributes.connector"},
		{"connector=lmcache,nixl", "connector=nixl", ""},
	} {
		err := check.Of(c).CheckPair(engineOf("p-1", "kvPort=1 "+k.p), engineOf("d-1", k.d))
		var parted *check.PairError
		if k.by == "" {
			assert.NoError(t, err, "%s | %s", k.p, k.d)
		} else if assert.ErrorAs(t, err, &parted, "%s | %s", k.p, k.d) {
			assert.Equal(t, check.PairError{Prefill: "p-1", Decode: "d-1", By: k.by}, *parted)
			assert.ErrorContains(t, err, "p-1 and d-1 cannot exchange KV: their "+k.by)
		}
	}
	both := engineOf("p-1", "")
	both.Role = discovery.RoleBoth
	var entry *attr.Error
	require.ErrorAs(t, check.Of(c).CheckPair(both, engineOf("d-1", "tpSize=3")), &entry,
		"of a pair it is one side, whatever it can do besides")
	assert.Equal(t, attr.Error{Endpoint: "p-1", Attribute: "kvPort", Problem: "is missing"}, *entry)
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
