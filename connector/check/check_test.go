// SPDX-License-Identifier: Apache-2.0

package check_test

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/discovery"
)

type fake struct{}

func (fake) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

func (fake) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

// wrapper is a connector around another one.
type wrapper struct{ connector.KVConnector }

func (w wrapper) Unwrap() connector.KVConnector { return w.KVConnector }

func parse(t testing.TB, api connector.API, body string) *connector.ClientRequest {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return r
}

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
	require.ErrorAs(t, check.Of(wrapper{declared{request: cannot}}).CheckRequest(plain), &u)
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
