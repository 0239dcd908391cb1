// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/responses"
	"github.com/pdkit/pdkit/transport"
)

// makers are one P and two D that keep their responses.
type makers struct {
	t     *testing.T
	d     []*enginesim.Engine
	index *responses.Index
	flow  *pdflow.Flow
}

func startMakers(t *testing.T, opts ...pdflow.Option) *makers {
	t.Helper()
	m := &makers{t: t}
	var eps []discovery.Endpoint
	for _, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode, discovery.RoleDecode} {
		e, err := enginesim.Start(atOwnPorts(t, enginesim.Config{Connector: "nixl", KeepResponses: true}))
		require.NoError(t, err)
		t.Cleanup(func() { _ = e.Close() })
		if eps = append(eps, endpoint(t, e.URL(), role)); role == discovery.RoleDecode {
			m.d = append(m.d, e)
		}
	}
	set, legs := setOf(t, eps...), transport.New(&transport.Options{NetHTTP: netHTTP})
	m.index = responses.New(set, legs)
	c, err := nixl.New(nil)
	require.NoError(t, err)
	m.flow, err = pdflow.New(c, pick.New(set, pick.RoundRobin()), append([]pdflow.Option{pdflow.WithTransport(legs),
		pdflow.WithResponses(m.index), pdflow.WithoutPickWait()}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.flow.Shutdown(context.Background()); _ = legs.Close() })
	return m
}

// ask sends a request with further members, and returns the response's id, or the error.
func (m *makers) ask(more string, change ...func(*pdflow.Request)) (id string, err error) {
	m.t.Helper()
	in := &pdflow.Request{API: connector.APIResponses,
		Body: []byte(`{"input":"hello","max_output_tokens":4` + more + `}`)}
	for _, f := range change {
		f(in)
	}
	resp, err := m.flow.Do(m.t.Context(), in)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var b strings.Builder
	buf := make([]byte, 4096)
	for {
		n, err := resp.Body.Read(buf)
		if b.Write(buf[:n]); err != nil {
			break
		}
	}
	return gjson.Get(b.String(), "id").String(), nil
}

func (m *makers) of(id string) int {
	m.t.Helper()
	engine, err := m.index.Find(m.t.Context(), id, func() http.Header { return http.Header{} })
	require.NoError(m.t, err)
	for i, d := range m.d {
		if d.URL() == "http://"+engine {
			return i
		}
	}
	return -1
}

func (m *makers) posts(i int) (n int) {
	for _, r := range m.d[i].Requests() {
		if r.Method == http.MethodPost {
			n++
		}
	}
	return n
}

// An engine that fails is asked again, and no other is.
func TestAFollowUpIsRetriedAtItsEngine(t *testing.T) {
	m := startMakers(t)
	id, err := m.ask("")
	require.NoError(t, err)
	i := m.of(id)
	before := m.posts(1 - i)
	m.d[i].Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Path: "/v1/responses"})
	next, err := m.ask(`,"previous_response_id":"` + id + `"`)
	require.NoError(t, err)
	assert.Equal(t, i, m.of(next))
	assert.Equal(t, before, m.posts(1-i))
}

func TestAResponseThatItsEngineHasForgotten(t *testing.T) {
	m := startMakers(t)
	id, err := m.ask("")
	require.NoError(t, err)
	require.NoError(t, m.d[m.of(id)].Restart())
	_, err = m.ask(`,"previous_response_id":"` + id + `"`)
	assert.ErrorIs(t, err, pdflow.CodeNoResponse)
	e, _ := errors.AsType[*pdflow.Error](err)
	assert.Equal(t, []any{404, "previous_response_id"}, []any{e.HTTPStatus(), e.Param})

	// one that another engine has after all, as where engines have changed their addresses
	id, err = m.ask("")
	require.NoError(t, err)
	i := m.of(id)
	m.index.Learn(id, strings.TrimPrefix(m.d[1-i].URL(), "http://"), "")
	next, err := m.ask(`,"previous_response_id":"` + id + `"`)
	require.NoError(t, err)
	assert.Equal(t, i, m.of(next))
}

// A model that the engine does not have is no lost response.
func TestA404ThatDoesNotSpeakOfTheResponse(t *testing.T) {
	m := startMakers(t)
	id, err := m.ask("")
	require.NoError(t, err)
	_, err = m.ask(`,"model":"x","previous_response_id":"` + id + `"`)
	assert.ErrorIs(t, err, pdflow.CodeDecodeRejected)
	_, known := m.index.Known(id)
	assert.True(t, known)
}

// A caller that names the engine is not corrected.
func TestACallerThatNamesTheEngineOfAFollowUp(t *testing.T) {
	m := startMakers(t)
	id, err := m.ask("")
	require.NoError(t, err)
	other := m.d[1-m.of(id)].URL()
	_, err = m.ask(`,"previous_response_id":"`+id+`"`, func(r *pdflow.Request) {
		r.Decode = strings.TrimPrefix(other, "http://")
	})
	assert.ErrorIs(t, err, pdflow.CodeDecodeRejected)
	_, err = m.ask(`,"previous_response_id":"`+id+`"`, func(r *pdflow.Request) {
		r.Pick = &pdflow.Pick{Decode: endpoint(t, other, discovery.RoleDecode)}
	})
	assert.ErrorIs(t, err, pdflow.CodeDecodeRejected)
}

func TestOneConversationStaysAtOneEngine(t *testing.T) {
	m := startMakers(t)
	turn := func(conversation string) int {
		id, err := m.ask(`,"conversation":` + conversation)
		require.NoError(t, err)
		return m.of(id)
	}
	first, other := turn(`"conv_1"`), turn(`{"id":"conv_2"}`)
	assert.NotEqual(t, first, other, "round robin")
	for range 3 {
		assert.Equal(t, []int{first, other}, []int{turn(`{"id":"conv_1"}`), turn(`"conv_2"`)})
	}
	for i := range 4 {
		for range i {
			_, err := m.ask("") // round robin goes on
			require.NoError(t, err)
		}
		m.d[first].Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusBadRequest})
		_, err := m.ask(`,"conversation":"conv_1"`)
		require.Error(t, err)
		assert.Equal(t, first, turn(`"conv_1"`), "a fault of the client's own says nothing of the engine")
	}
	m.d[first].Kill()
	_, err := m.ask(`,"conversation":"conv_1"`)
	require.Error(t, err)
	assert.Equal(t, other, turn(`"conv_1"`), "the conversation goes on where it can")
}

func TestAMuxTakesNoIndexOfResponses(t *testing.T) {
	_, err := pdflow.NewMux(pdflow.WithResponses(&responses.Index{}))
	assert.ErrorContains(t, err, "WithResponses")
	c, err := nixl.New(nil)
	require.NoError(t, err)
	_, err = pdflow.New(c, pick.New(setOf(t), pick.RoundRobin()), pdflow.WithResponses(nil))
	assert.ErrorContains(t, err, "WithResponses")
}
