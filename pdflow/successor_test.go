// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
)

// lone is a picker that picks one engine, which serves each request alone.
type lone struct{ e discovery.Endpoint }

func (*meanwhile) names() []string    { return nil }
func (*meanwhile) serves(string) bool { return false }

func (p lone) Pick(context.Context, *PickInput) (Pick, error)       { return Pick{Decode: p.e}, nil }
func (lone) Changed() <-chan struct{}                               { return nil }
func (lone) Ready(*PickInput) error                                 { return nil }
func (p lone) Bind(connector.KVConnector, connector.Serving) Picker { return p }

// meanwhile is a route that calls event once before it returns its flow. There the test replaces the flow and shuts it
// down, as may happen between a request's look at its route and its start.
type meanwhile struct {
	flow  *Flow
	once  sync.Once
	event func()
}

func (m *meanwhile) flowFor(*connector.ClientRequest, string) *Flow {
	m.once.Do(m.event)
	return m.flow
}

func (m *meanwhile) Ready(ctx context.Context) error { return m.flow.Ready(ctx) }

func TestASuccessorServesWhatItsPredecessorNoLongerTakes(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"text":"hello"}]}`)
	}))
	defer engine.Close()
	e, err := discovery.New(engine.URL, discovery.RoleBoth)
	require.NoError(t, err)
	flow := func() *Flow {
		conn, err := plainhttp.New(nil)
		require.NoError(t, err)
		f, err := New(conn, lone{e})
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Shutdown(context.Background()) })
		return f
	}
	ask := func(m *Mux) int {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":"x"}`))
		r.Header.Set("Content-Type", "application/json")
		m.ServeHTTP(w, r)
		return w.Code
	}
	m, err := NewMux()
	require.NoError(t, err)
	old := flow()
	require.NoError(t, m.SetRoutes(map[string]Server{"": &meanwhile{flow: old, event: func() {
		assert.NoError(t, m.SetRoutes(map[string]Server{"": flow()}))
		assert.NoError(t, old.Shutdown(context.Background()))
	}}}))
	assert.Equal(t, http.StatusOK, ask(m))

	last := flow()
	require.NoError(
		t, m.SetRoutes(map[string]Server{"": &meanwhile{flow: last, event: func() {
			assert.NoError(t, last.Shutdown(context.Background()))
		}}}),
	)
	assert.Equal(t, http.StatusServiceUnavailable, ask(m), "without a successor it is draining")
}
