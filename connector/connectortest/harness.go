// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// Harness is a connector under test and what its protocol has on the other side. Only New is required. What the
// connector declares in its Traits is not said again: which rules apply, the suite takes from there.
type Harness struct {
	// New makes the connector from its settings, as its registered function does, which is the default. What it listens
	// on must be free ports of loopback with Config.
	New func(config json.RawMessage) (connector.KVConnector, error)

	Name      string            // the registered name; "" for a connector that is not registered
	Config    json.RawMessage   // valid settings, each other than its default; nil is none
	BadConfig []json.RawMessage // settings that must be refused with a [config.FieldError] that has a path

	// Prefill and Decode are the engines. What is left zero is filled: URLs, IDs, roles. Attributes are those that the
	// protocol needs.
	Prefill, Decode discovery.Endpoint

	// Response is P's good response to a prefill leg, for any of the APIs that Traits declares. It is required where
	// Traits declares a Handoff. It may depend on the session, and must be the same for the same session.
	Response func(s *connector.Session, prefill []byte) Response
	// Needs are the keys of the handoff without which it must be refused, with dots between nested names. They are for
	// a handoff that is a member of the body.
	Needs []string
	// BadResponses must be refused, besides those that the suite derives from Response, Needs and Traits.
	BadResponses []Response

	Call  connector.Caller                           // answers the side calls of a Preparer
	Event func(s *connector.Session) connector.Event // what an Expecter waits for
	// an encode engine's body for an Encoder's item
	Encoded func(s *connector.Session, i connector.Item) json.RawMessage

	// Except are the rules that the protocol does not follow. One that nothing needs is a fault of the harness.
	Except Exceptions

	Timeout time.Duration // for whatever must end; default 5 s
}

// Response is P's response to a prefill leg. The zero value is that of an engine without KV transfer, which ended by
// length after one token.
type Response struct {
	Handoff string      // the value that Traits' Handoff names: raw JSON for a member, text for a header; "" is none
	Status  int         // 0 is 200
	Header  http.Header // besides Content-Type and the handoff
	Body    []byte      // nil: a whole response of one token in the session's API; the handoff is put into it
}

// fill puts the handoff where it is declared, and gives what is left zero its value.
func (r Response) fill(at connector.Handoff, api connector.API) Response {
	r.Status = cmp.Or(r.Status, http.StatusOK)
	if r.Header = r.Header.Clone(); r.Header == nil {
		r.Header = http.Header{}
	}
	r.Header.Set("Content-Type", "application/json")
	if r.Body == nil {
		r.Body = []byte(responseTexts[api])
	}
	if r.Handoff == "" {
		return r
	}
	if at.Header != "" {
		r.Header.Set(at.Header, r.Handoff)
	} else if body, err := sjson.SetRawBytes(r.Body, gjsonPath(at.Member), []byte(r.Handoff)); err == nil {
		r.Body = body
	}
	return r
}

func (r *Response) result() *connector.PrefillResult {
	return &connector.PrefillResult{Status: r.Status, Header: r.Header, Body: r.Body, At: began}
}

// Exceptions are what a protocol does otherwise than most. Say why beside each.
type Exceptions struct {
	KeepsLimit    bool     // P gets the client's limits of tokens: it ends by itself
	KeepsStream   bool     // P gets the client's stream and stream_options
	KeepsChoices  bool     // P gets the client's n and best_of
	KeepsLogprobs bool     // P's log probabilities are wanted
	NeedsConfig   bool     // an empty configuration is refused
	NotByID       bool     // nothing in the legs matches them, although Traits tells no other way for D to find the KV
	Rewrites      []string // members of the client APIs that a leg has otherwise than the client: prompt, max_tokens
	Refuses       []string // members that CheckRequest names though most protocols carry them: logprobs, tools
	PassesEmpty   bool     // P says by an empty object that it transfers nothing: D gets it and computes the prompt
	BareIPv6      bool     // addresses stand so that they need no brackets, and the engines take none

	// OwnValues are for rules about pairs that accept only one value of an attribute, on both engines: by attribute.
	OwnValues map[string]string
}

// transferMembers carry the transfer instructions of the protocols that pdkit knows: never the client's, whatever the
// connector declares.
var transferMembers = []string{
	"kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port",
	"bootstrap_room",
}

// Planted values stand where an error text, or another request, must not repeat them.
const (
	plantedPrompt  = "planted-prompt-81c4"
	plantedClient  = "planted-client-2b7e"
	plantedRequest = "planted-request-id-77f0"
	plantedValue   = "planted-value-c9d3"
	hostP, hostD   = "planted-prefill.example", "planted-decode.example"
	hostE          = "planted-encode.example"
	idP, idD, idE  = "engine-p", "engine-d", "engine-e"
	addressP6      = "2001:db8::7"
	addressD6      = "2001:db8::8"
	modelName      = "some/model"
	defaultTimeout = 5 * time.Second
)

// Open returns the function with which the registered connector of that name, or of that class name, is made.
func Open(name string) func(settings json.RawMessage) (connector.KVConnector, error) {
	return func(settings json.RawMessage) (connector.KVConnector, error) {
		return connector.Open(config.Spec{Type: name, Config: settings})
	}
}

func (h *Harness) fill() error {
	if h.New == nil {
		if h.Name == "" {
			return errors.New("it has neither New nor Name")
		}
		h.New = Open(h.Name)
	}
	h.Prefill = fillEndpoint(h.Prefill, idP, hostP+":8100", discovery.RolePrefill)
	h.Decode = fillEndpoint(h.Decode, idD, hostD+":8200", discovery.RoleDecode)
	if h.Timeout <= 0 {
		h.Timeout = defaultTimeout
	}
	return nil
}

func fillEndpoint(e discovery.Endpoint, id, hostport string, role discovery.Role) discovery.Endpoint {
	if e.URL == nil {
		e.URL = &url.URL{Scheme: "http", Host: hostport}
	}
	e.ID = id // other than the address, so that an error may show it
	if e.Role == 0 {
		e.Role = role
	}
	e.Attributes = maps.Clone(e.Attributes)
	return e
}

// trial is one connector under one rule.
type trial struct {
	Harness
	ctx     context.Context
	c       connector.KVConnector
	traits  connector.Traits
	order   connector.Order // in which sessions are played
	apis    []connector.API // that Traits declares
	started bool

	mu    sync.Mutex
	calls []string // the URLs of side calls
}

func (h Harness) newTrial(ctx context.Context, start bool) (*trial, error) {
	t := &trial{Harness: h, ctx: ctx}
	err := guard(func() (err error) { t.c, err = h.New(slices.Clone(h.Config)); return err })
	if err == nil && t.c == nil {
		err = errors.New("it is nil, without an error")
	}
	if err != nil {
		return nil, fmt.Errorf("making one with the harness's Config: %w", err)
	}
	if err := t.declare(); err != nil {
		return nil, err
	}
	if s, ok := connector.As[connector.Starter](t.c); ok && start {
		if err := guard(func() error { return s.Start(ctx) }); err != nil {
			return nil, fmt.Errorf("calling Start: %w", err)
		}
		t.started = true
	}
	return t, nil
}

// declare takes what the rules need from the declaration.
func (t *trial) declare() error {
	t.traits = t.c.Traits()
	t.order = t.traits.Order
	t.apis = slices.DeleteFunc(connector.APIs(), func(a connector.API) bool { return !check.Of(t.c).Carries(a) })
	at := t.traits.Handoff
	switch {
	case len(t.apis) == 0:
		return errors.New("its Traits declares APIs, and none of them is known")
	case at.Named() && t.Response == nil:
		return fmt.Errorf("the harness has no Response, but Traits declares a handoff in P's response (%s): give a "+
			"good one,"+
			" from which the suite derives bad ones", place(at))
	case at.Member == "" && t.Needs != nil:
		return errors.New("the harness has Needs, but Traits declares no handoff in a member")
	}
	return nil
}

func place(h connector.Handoff) string {
	if h.Header != "" {
		return "header " + h.Header
	}
	return "member " + h.Member
}

func (t *trial) end() error {
	closer, ok := connector.As[io.Closer](t.c)
	if !ok || !t.started {
		return nil
	}
	return t.within("Close", closer.Close)
}

// within calls something that must return in time.
func (t *trial) within(what string, call func() error) error {
	done := make(chan error, 1)
	go func() { done <- guard(call) }()
	timer := time.NewTimer(t.Timeout)
	defer timer.Stop()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	case <-timer.C:
		return fmt.Errorf("%s has not returned after %v", what, t.Timeout)
	}
}

// random returns randomness number n: the same for the same n, and no two alike in any part.
func random(n int) (r [16]byte) {
	next := func(x uint64) uint64 { // splitmix64
		x += 0x9e3779b97f4a7c15
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		return x ^ x>>31
	}
	binary.LittleEndian.PutUint64(r[:8], next(uint64(n)*2+1))
	binary.LittleEndian.PutUint64(r[8:], next(uint64(n)*2+2))
	return r
}

// began is when all sessions of the suite began: a fixed time, so that equal sessions are equal.
var began = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// session makes session number n of a request.
func (t *trial) session(r *connector.ClientRequest, n int) *connector.Session {
	if clean, err := contract.Without(r, t.traits.Members); err == nil { // as the flow does it
		r = clean
	}
	s := contract.NewSessionWith(random(n), r, plantedRequest, t.Prefill, t.Decode)
	s.CreatedAt = began
	s.Header = map[string][]string{"Content-Type": {"application/json"}, "X-Request-Id": {plantedRequest}}
	if _, ok := connector.As[connector.Encoder](t.c); ok {
		s.Encode = []discovery.Endpoint{fillEndpoint(discovery.Endpoint{}, idE, hostE+":8300", discovery.RoleEncode)}
	}
	return s
}

// request parses a sample. Samples are well formed for any API, so that an error is a fault of this package.
func request(s sample) *connector.ClientRequest {
	r, err := connector.ParseRequest(s.api, []byte(s.body))
	if err != nil {
		panic(fmt.Errorf("connectortest: sample %s: %w", s, err))
	}
	return r
}

// unsupported is what the flow asks before it makes a session.
func (t *trial) unsupported(r *connector.ClientRequest) string {
	if u, ok := errors.AsType[*connector.UnsupportedError](check.Of(t.c).CheckRequest(r)); ok {
		return u.Member
	}
	return ""
}
