// SPDX-License-Identifier: Apache-2.0

// Package wrong has a small connector that is right, Toy, and many that are wrong in one thing each, Faults: they show
// that each rule of package connectortest can fail.
package wrong

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name that the toy is registered under.
const Name = "conformance-toy"

func init() {
	connector.Register(Name, func(config json.RawMessage) (connector.KVConnector, error) { return New(config) })
}

// Toy is a protocol that uses nearly every ability: P's KV port is an attribute, its engine id is asked for, both legs
// carry a transfer id, D needs P's handoff, and a notice comes between the legs.
type Toy struct {
	o Options

	mu      sync.Mutex
	stop    chan struct{}
	stopped sync.WaitGroup
	waiting map[string]chan connector.Event
}

// Options are the toy's settings.
type Options struct {
	BlockSize    int              `json:"blockSize"`
	PollInterval *config.Duration `json:"pollInterval"`
	Link         Link             `json:"link"`
}

// Link are settings within a setting.
type Link struct {
	Speed  int    `json:"speed"`
	Device string `json:"device"`
}

// New makes a toy.
func New(settings json.RawMessage) (*Toy, error) {
	var o Options
	if err := config.Decode(settings, &o); err != nil {
		return nil, err
	}
	if o.BlockSize < 0 {
		return nil, &config.FieldError{Path: "blockSize", Problem: "is negative", Remedy: "0 or more"}
	}
	return &Toy{o: o, waiting: map[string]chan connector.Event{}}, nil
}

// Traits declares the toy's protocol. One tensor-parallel size must divide the other.
func (*Toy) Traits() connector.Traits {
	return connector.Traits{
		Name:    Name,
		Members: []string{connector.ParamsMember},
		Handoff: connector.Handoff{Member: connector.ParamsMember, Lease: time.Minute, MultiUse: true},
		PairRules: []attr.PairRule{attr.Multiple(attr.TPSize),
			attr.Shared(attr.Store)},
		Attributes: []attr.Required{
			{Name: "kvPort", Role: discovery.RolePrefill, Remedy: "the engine's --kv-port"},
		},
	}
}

// CheckEndpoint wants a kvPort.
func (*Toy) CheckEndpoint(e discovery.Endpoint) error {
	if e.Role == discovery.RoleDecode {
		return nil
	}
	if _, err := attr.Port(e, "kvPort", 0); err != nil {
		return &config.FieldError{Path: "attributes.kvPort", Problem: "is missing or no port",
			Remedy: "the engine's --kv-port"}
	}
	return nil
}

// Prepare asks P for its engine id.
func (*Toy) Prepare(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
	at, err := address(s.Prefill)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at+"/engine", http.NoBody)
	if err != nil {
		return nil, errors.New("the engine's address is not usable")
	}
	resp, err := call(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var response struct {
		ID string `json:"engine_id"`
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil || resp.StatusCode != http.StatusOK || json.Unmarshal(body, &response) != nil || response.ID == "" {
		return nil, errors.New("the engine does not tell its id")
	}
	return response.ID, nil
}

func address(e discovery.Endpoint) (string, error) {
	port, err := attr.Port(e, "kvPort", 0)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(e.Host(), strconv.Itoa(port)), nil
}

// Prefill asks P to keep its KV under the session's id.
func (*Toy) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	return params(s, leg)
}

func params(s *connector.Session, leg *connector.Leg) error {
	at, err := address(s.Prefill)
	if err != nil {
		return err
	}
	engine, _ := s.Prepared.(string)
	leg.Param("transfer_id", connector.Quote(s.UUID()))
	leg.Param("remote_address", connector.Quote(at))
	leg.Param("remote_engine", connector.Quote(engine))
	return nil
}

// Decode relays P's handoff, once the notice says that it is there.
func (t *Toy) Decode(_ context.Context, s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
	raw, err := Handoff(p)
	if err != nil {
		return err
	}
	if err := CheckEvent(s); err != nil {
		return err
	}
	if err := params(s, leg); err != nil {
		return err
	}
	leg.Params(raw)
	return nil
}

// Handoff returns P's handoff, if it is usable.
func Handoff(p *connector.PrefillResult) (json.RawMessage, error) {
	raw, ok := p.Field(connector.ParamsMember)
	if !ok {
		return nil, handoff.NoTransfer("kv_transfer_params is absent")
	}
	var h struct {
		Blocks []int64 `json:"remote_blocks"`
		Token  string  `json:"remote_token"`
	}
	if err := json.Unmarshal(raw, &h); err != nil || len(h.Blocks) == 0 || h.Token == "" {
		return nil, handoff.NoTransfer("kv_transfer_params lacks blocks or a token")
	}
	return raw, nil
}

// CheckEvent wants the notice to say that the KV is there.
func CheckEvent(s *connector.Session) error {
	var e struct {
		Ready bool `json:"ready"`
	}
	if err := json.Unmarshal(s.Event.Body, &e); err != nil || !e.Ready {
		return handoff.NoTransfer("the notice does not say that the KV is there")
	}
	return nil
}

// Final lets P's response be the client's where P ended by itself.
func (*Toy) Final(s *connector.Session, p *connector.PrefillResult) (connector.Response, bool) {
	var a struct {
		Choices []struct {
			Reason string `json:"finish_reason"`
		} `json:"choices"`
	}
	if json.Unmarshal(p.Body, &a) != nil || len(a.Choices) != 1 || a.Choices[0].Reason != "stop" {
		return connector.Response{}, false
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(p.Body, &m) != nil {
		return connector.Response{}, false
	}
	delete(m, connector.ParamsMember)
	body, err := json.Marshal(m) // in one line
	if err != nil {
		return connector.Response{}, false
	}
	if s.Request.Stream {
		return connector.Response{Events: [][]byte{body, []byte("[DONE]")}}, true
	}
	return connector.Response{Body: body}, true
}

// Rewrite tells which engine decoded, in each response that is not streamed.
func (*Toy) Rewrite(s *connector.Session, _ func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	if s.Request.Stream {
		return nil
	}
	return func(data []byte) ([]byte, error) {
		var m map[string]json.RawMessage
		if err := json.Unmarshal(data, &m); err != nil || m == nil {
			return nil, errors.New("the response is no object")
		}
		m["decoded_by"] = connector.Quote(s.Decode.ID)
		return json.Marshal(m)
	}
}

// Items are the pictures of a chat with a list of parts.
func (*Toy) Items(s *connector.Session) (items []connector.Item) {
	var messages []struct {
		Content []json.RawMessage `json:"content"`
	}
	if raw, ok := s.Field("messages"); !ok || json.Unmarshal(raw, &messages) != nil {
		return nil
	}
	for _, m := range messages {
		for _, part := range m.Content {
			if bytes.Contains(part, []byte("image_url")) {
				items = append(items, connector.Item{ID: string(part), Part: part})
			}
		}
	}
	return items
}

// Encode asks for one picture.
func (*Toy) Encode(_ *connector.Session, i connector.Item, leg *connector.Leg) error {
	leg.SetBody(json.RawMessage(`{"messages":[{"role":"user","content":[` + string(i.Part) + `]}]}`))
	return nil
}

// Merge wants each response to be an object.
func (*Toy) Merge(_ *connector.Session, responses []json.RawMessage) error {
	for _, a := range responses {
		var m map[string]json.RawMessage
		if json.Unmarshal(a, &m) != nil {
			return errors.New("an encode engine's response is no object")
		}
	}
	return nil
}

// Start begins to listen, here to nothing.
func (t *Toy) Start(context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stop != nil {
		return errors.New("started already")
	}
	stop := make(chan struct{})
	t.stop = stop
	t.stopped.Go(func() { <-stop })
	return nil
}

// Close ends what Start began.
func (t *Toy) Close() error {
	t.mu.Lock()
	if t.stop != nil {
		close(t.stop)
		t.stop = nil
	}
	t.mu.Unlock()
	t.stopped.Wait()
	return nil
}

// Expect waits for a session's notice.
func (t *Toy) Expect(s *connector.Session) (wait func(context.Context) (connector.Event, error), done func(error)) {
	ch := make(chan connector.Event, 1)
	t.mu.Lock()
	t.waiting[s.ID] = ch
	t.mu.Unlock()
	wait = func(ctx context.Context) (connector.Event, error) {
		select {
		case e := <-ch:
			return e, nil
		case <-ctx.Done():
			return connector.Event{}, ctx.Err()
		}
	}
	return wait, func(error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.waiting, s.ID)
	}
}

// Clean tells P that nobody will read its KV.
func (*Toy) Clean(ctx context.Context, s *connector.Session, _ error, call connector.Caller) error {
	at, err := address(s.Prefill)
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodDelete, "http://"+at+"/transfers/"+s.UUID(), http.NoBody)
	if err != nil {
		return errors.New("the engine's address is not usable")
	}
	resp, err := call(r)
	if err == nil {
		err = resp.Body.Close()
	}
	return err
}
