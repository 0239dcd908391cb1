// SPDX-License-Identifier: Apache-2.0

// Package play describes legs one by one, for tests of what a protocol has of its own. What all protocols have in
// common is tested by package connectortest, which plays whole sessions.
package play

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// T is what the tests give of their *testing.T. Package testing would add its flags to programs that link this one.
type T interface {
	Helper()
	Fatal(args ...any)
	Errorf(format string, args ...any)
}

// Open makes the connector that is registered by a name or a class name.
func Open(t T, name, settings string) connector.KVConnector {
	t.Helper()
	c, err := connector.Open(config.Spec{Type: name, Config: json.RawMessage(settings)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// New makes a connector from its options by its package's New.
func New[C, O any](t T, newC func(*O) (C, error), o *O) C {
	t.Helper()
	c, err := newC(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Request parses a client's body.
func Request(t T, api connector.API, body string) *connector.ClientRequest {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Engine is an engine at a URL.
func Engine(t T, url string, role discovery.Role, attributes map[string]string) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New(url, role)
	if err != nil {
		t.Fatal(err)
	}
	e.Attributes = attributes
	return e
}

// Session is a session of http://10.0.0.5:8100 and http://10.0.0.6:8200. The attributes are those of the prefill
// engine, then those of the decode engine; both may be left out.
func Session(t T, api connector.API, body string, attributes ...map[string]string) *connector.Session {
	t.Helper()
	attributes = append(attributes, nil, nil)
	return contract.NewSession(Request(t, api, body), "the-clients-id",
		Engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, attributes[0]),
		Engine(t, "http://10.0.0.6:8200", discovery.RoleDecode, attributes[1]))
}

// Known is a [Session] whose random bytes are known, by which protocols name transfers.
func Known(t T, random [16]byte, api connector.API, body string,
	attributes ...map[string]string) *connector.Session {
	t.Helper()
	s := Session(t, api, body, attributes...)
	return contract.NewSessionWith(random, s.Request, s.RequestID, s.Prefill, s.Decode)
}

// Response is P's response to a prefill leg.
func Response(body string) *connector.PrefillResult {
	return &connector.PrefillResult{Status: http.StatusOK, Body: []byte(body), At: time.Now()}
}

// Leg is a leg as an engine gets it.
type Leg struct {
	Body   string
	Header http.Header // what the connector sets
}

// Read takes a leg as it would be sent.
func Read(l *connector.Leg) (Leg, error) {
	body, err := contract.Body(l)
	header := http.Header{}
	for _, h := range contract.Leg(l).Headers {
		header.Add(h.Name, h.Value)
	}
	return Leg{string(body), header}, err
}

// TryPrefill describes the prefill leg.
func TryPrefill(c connector.KVConnector, s *connector.Session) (Leg, error) {
	l := contract.NewPrefillLeg(s.Request, new(c.Traits()))
	if err := c.Prefill(context.Background(), s, l); err != nil {
		return Leg{}, err
	}
	return Read(l)
}

// Prefill describes a prefill leg that must not be refused.
func Prefill(t T, c connector.KVConnector, s *connector.Session) Leg {
	t.Helper()
	l, err := TryPrefill(c, s)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TryDecode describes the decode leg after a response of P's, which is nil where P has not answered.
func TryDecode(c connector.KVConnector, s *connector.Session, p *connector.PrefillResult) (Leg, error) {
	l := contract.NewLeg(s.Request)
	if err := c.Decode(context.Background(), s, p, l); err != nil {
		return Leg{}, err
	}
	return Read(l)
}

// Decode describes a decode leg that must not be refused.
func Decode(t T, c connector.KVConnector, s *connector.Session, p *connector.PrefillResult) Leg {
	t.Helper()
	l, err := TryDecode(c, s, p)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Uncarried names the member because of which two engines cannot serve a request together; "" if there is none.
func Uncarried(c connector.KVConnector, r *connector.ClientRequest) string {
	if u, ok := errors.AsType[*connector.UnsupportedError](check.Of(c).CheckRequest(r)); ok {
		return u.Member
	}
	return ""
}
