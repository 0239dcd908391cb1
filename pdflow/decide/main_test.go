// SPDX-License-Identifier: Apache-2.0

package decide_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// anyAlone are the rules of a connector that forbids nothing.
var anyAlone = connector.Serving{}

func newSet(t testing.TB, eps ...discovery.Endpoint) *discovery.Set {
	t.Helper()
	source := discoverytest.NewManual()
	set := discovery.NewSet(source)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = set.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	changed := set.Changed()
	source.Publish(eps...)
	<-changed
	return set
}

// engine makes an endpoint; attributes are like "tpSize=2 group=a".
func engine(id string, role discovery.Role, attributes string) discovery.Endpoint {
	e, err := discovery.New("http://"+id+":1", role)
	if err != nil {
		panic(err)
	}
	e.ID = id
	e.Attributes = map[string]string{}
	for a := range strings.FieldsSeq(attributes) {
		name, value, _ := strings.Cut(a, "=")
		if name == "group" {
			e.Group = value
			continue
		}
		e.Attributes[name] = value
	}
	return e
}

func engines(n int, attributes string) []discovery.Endpoint {
	var eps []discovery.Endpoint
	for i := range n {
		eps = append(eps, engine("p"+strconv.Itoa(i), discovery.RolePrefill, attributes),
			engine("d"+strconv.Itoa(i), discovery.RoleDecode, attributes))
	}
	return eps
}

func completion(t testing.TB, prompt string) *connector.ClientRequest {
	t.Helper()
	r, err := connector.ParseRequest(connector.APICompletions,
		fmt.Appendf(nil, `{"model":"m","prompt":%s,"max_tokens":100,"stream":true}`, prompt))
	require.NoError(t, err)
	return r
}

func text(n int) string { return strconv.Quote(strings.Repeat("word ", n/5+1)[:n]) }

// around makes a picker, bound to rules that forbid nothing.
func around(t testing.TB, set *discovery.Set, policy decide.Policy, o *decide.Options) pdflow.Picker {
	t.Helper()
	p, err := decide.New(pick.New(set, pick.TwoChoices(), pick.WithCandidates(), pick.WithSeed(1)),
		policy, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p.Bind(nil, anyAlone)
}

func mustPick(t testing.TB, p pdflow.Picker, in *pdflow.PickInput) pdflow.Pick {
	t.Helper()
	x, err := p.Pick(context.Background(), in)
	require.NoError(t, err)
	return x
}

// h100s tells the speed of all engines.
func h100s(*discovery.Endpoint) decide.Facts { return decide.Facts{Speed: h100} }
