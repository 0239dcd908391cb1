// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// Harness is a connector under test and what its protocol has on the other side. Only New is required.
type Harness struct {
	// New makes the connector from its settings, as its registered factory does. What it listens on must be free ports of
	// loopback with Config.
	New func(config json.RawMessage) (connector.KVConnector, error)

	Name      string            // the registered name; "" for a connector that is not registered
	Config    json.RawMessage   // valid settings, each other than its default; nil is none
	BadConfig []json.RawMessage // settings that must be refused with a [config.FieldError] that has a path

	// APIs are those that the protocol carries; nil is chat, completions, responses, messages and generate. Others must have a reason
	// in Unsupported.
	APIs []connector.API

	// Prefill and Decode are the engines. What is left zero is filled: URLs, IDs, roles. Attributes are those that the protocol needs.
	Prefill, Decode discovery.Endpoint

	// Answer is a good answer of P to a prefill leg, for any of the APIs ([AnswerWith] makes one); nil where decode reads nothing of it.
	// Bodies may depend on the session, and must be the same for the same session.
	Answer func(s *connector.Session, prefill []byte) []byte
	// Needs are the parts of the answer without which it must be refused, with dots between members (kv_transfer_params.remote_host);
	// nil is the transfer members at its top level.
	Needs []string
	// BadAnswers are answers that must be refused, besides those that the suite derives from Answer and Needs.
	BadAnswers [][]byte

	Call    connector.Caller                                             // answers the side calls of a Preparer
	Event   func(s *connector.Session) connector.Event                   // what an Expecter waits for
	Encoded func(s *connector.Session, i connector.Item) json.RawMessage // an encode engine's answer to an Encoder's item

	// Own are top-level members that the connector may set on either leg, besides the transfer members and request_id.
	Own []string
	// ByID says that the engines match the legs by an id in both. Orders other than prefill-then-decode and decode-first need one
	// without it being said.
	ByID bool
	// Except are the rules that the protocol does not follow. One that nothing needs is a fault of the harness.
	Except Exceptions

	Versions []launch.Version // for which launch settings are rendered, besides the newest
	Timeout  time.Duration    // for whatever must end; default 5 s
}

// Exceptions are what a protocol does otherwise than most. Say why beside each.
type Exceptions struct {
	KeepsLimit    bool     // P gets the client's limits of tokens: it ends by itself
	KeepsStream   bool     // P gets the client's stream and stream_options
	KeepsAnswers  bool     // P gets the client's n and best_of
	KeepsLogprobs bool     // P's log probabilities are wanted
	NeedsConfig   bool     // an empty configuration is refused
	NotByID       bool     // the order needs an id, and yet nothing in the legs matches them
	Carries       []string // members whose requests are carried though Unsupported mostly names them: prompt, use_beam_search, prompt_logprobs
	Refuses       []string // members that Unsupported names though most protocols carry them: logprobs, stop, tools
	OwnSettings   []string // settings that are pdkit's own (paths: a.b), so that launch settings need not name them
	BareIPv6      bool     // addresses stand so that they need no brackets, and the engines take none

	// OwnValues are attributes of which a rule about pairs lets only the connector's own value meet, and that value.
	OwnValues map[string]string
}

// transferMembers are what carries transfer instructions: never the client's, always the connector's to set.
var transferMembers = []string{
	"kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
}

// Canaries stand where an error text, or another request, must not repeat them.
const (
	promptCanary   = "canary-prompt-81c4"
	clientCanary   = "canary-client-2b7e"
	requestCanary  = "canary-request-id-77f0"
	valueCanary    = "canary-value-c9d3"
	hostP, hostD   = "canary-prefill.example", "canary-decode.example"
	hostE          = "canary-encode.example"
	idP, idD, idE  = "engine-p", "engine-d", "engine-e"
	addressP6      = "2001:db8::7"
	addressD6      = "2001:db8::8"
	modelName      = "some/model"
	defaultTimeout = 5 * time.Second
)

func (h *Harness) fill() error {
	if h.New == nil {
		return errors.New("it has no New")
	}
	if h.APIs == nil {
		h.APIs = []connector.API{connector.APIChat, connector.APICompletions, connector.APIResponses, connector.APIMessages, connector.APIGenerate}
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
	t.traits = t.c.Traits()
	if s, ok := connector.As[connector.Starter](t.c); ok && start {
		if err := guard(func() error { return s.Start(ctx) }); err != nil {
			return nil, fmt.Errorf("calling Start: %w", err)
		}
		t.started = true
	}
	return t, nil
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
func (t *trial) session(r *connector.Request, n int) *connector.Session {
	if clean, err := r.Without(t.traits.Members); err == nil { // as the flow does it
		r = clean
	}
	s := connector.NewSessionWith(random(n), r, requestCanary, t.Prefill, t.Decode)
	s.CreatedAt = began
	s.Header = map[string][]string{"Content-Type": {"application/json"}, "X-Request-Id": {requestCanary}}
	if _, ok := connector.As[connector.Encoder](t.c); ok {
		s.Encode = []discovery.Endpoint{fillEndpoint(discovery.Endpoint{}, idE, hostE+":8300", discovery.RoleEncode)}
	}
	return s
}

// request parses a sample. Samples are well formed for any API, so that an error is a fault of this package.
func request(s sample) (*connector.Request, error) {
	r, err := connector.ParseRequest(s.api, []byte(s.body))
	if err != nil {
		return nil, fmt.Errorf("connectortest: sample %s: %w", s, err)
	}
	return r, nil
}

// unsupported is what the flow asks before it makes a session.
func (t *trial) unsupported(r *connector.Request) string {
	if u, ok := errors.AsType[*connector.UnsupportedError](connector.CheckRequest(t.c, r)); ok {
		return u.Member
	}
	return ""
}
