// SPDX-License-Identifier: Apache-2.0

package ticket_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	_ "example.com/ticket"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// engine answers with a ticket if it has one, and keeps the request that it got.
func engine(t *testing.T, role discovery.Role, ticket string) (e discovery.Endpoint, asked func() map[string]any) {
	t.Helper()
	var body map[string]any
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		if ticket != "" {
			w.Header().Set("X-KV-Ticket", ticket)
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"text":"ok","finish_reason":"length"}]}`)
	}))
	t.Cleanup(server.Close)
	e, err := discovery.New(server.URL, role)
	if err != nil {
		t.Fatal(err)
	}
	return e, func() map[string]any { return body }
}

// If a client sends a ticket of its own, D still gets P's.
func TestTicketsArePsOwn(t *testing.T) {
	for given, status := range map[string]int{"t-1": http.StatusOK, "": http.StatusBadGateway} {
		c, err := connector.Open(config.Spec{Type: "TicketConnector"})
		if err != nil {
			t.Fatal(err)
		}
		p, askedP := engine(t, discovery.RolePrefill, given)
		d, askedD := engine(t, discovery.RoleDecode, "")
		picker := pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
			return pdflow.Pick{Prefill: p, Decode: d}, nil
		})
		flow, err := pdflow.New(c, picker)
		if err != nil {
			t.Fatal(err)
		}
		w := httptest.NewRecorder()
		body := `{"prompt":"x","max_tokens":9,"kv_ticket":"stolen","vllm_xargs":{"kv_ticket":"stolen"}}`
		r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		flow.ServeHTTP(w, r)
		if w.Code != status {
			t.Errorf("P gives %q: %d %s", given, w.Code, w.Body)
		}
		if sent, err := json.Marshal(askedP()); err != nil || strings.Contains(string(sent), "stolen") {
			t.Errorf("P was asked %s", sent)
		}
		switch got := askedD(); {
		case given == "" && got != nil:
			t.Errorf("P gives no ticket: D was asked %v", got)
		case given != "" && (got["kv_ticket"] != given || strings.Contains(w.Body.String(), given)):
			t.Errorf("P gives %q: D was asked %v", given, got)
		}
		if err := flow.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestItHasNoSettings(t *testing.T) {
	if _, err := connector.Open(config.Spec{Type: "ticket", Config: json.RawMessage(`{"lease":"1s"}`)}); err == nil {
		t.Error("an unknown setting is read")
	}
}
