// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"context"
	"net/http"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// Kept are the responses that an engine keeps in memory for GET, for cancel, and for requests that name one as
// previous_response_id. They are never removed, and lost when the engine restarts (vLLM 0.32.0,
// vllm/entrypoints/openai/responses/serving.py). A nil *Kept keeps none.
type Kept struct {
	mu  sync.Mutex
	all map[string]*keptResponse
}

type keptResponse struct {
	input  []chatMessage // of the responses before it, too
	body   python.Object
	status string // "": the response is whole, and says it
	output string
	cancel context.CancelFunc // of one in the background
	events *Events            // of one that is streamed in the background
}

// NewKept keeps no response yet.
func NewKept() *Kept { return &Kept{all: map[string]*keptResponse{}} }

func (k *Kept) get(id string) (*keptResponse, *Error) {
	if k != nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		if r := k.all[id]; r != nil {
			return r, nil
		}
	}
	return nil, invalidResponse(http.StatusNotFound, "response_id", "Response with id '"+id+"' not found.")
}

func invalidResponse(status int, param, message string) *Error {
	return &Error{Message: message, Type: "invalid_request_error", Param: &param, Code: status}
}

// keep keeps a response that is whole, unless it was cancelled.
func (k *Kept) keep(f *responsesFormat, body python.Object, o *core.Outcome) {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.all[f.call.id]
	if r == nil {
		r = &keptResponse{input: f.messages}
		k.all[f.call.id] = r
	}
	if r.status != statusCancelled {
		r.body, r.status, r.output = body, "", o.Text
	}
}

const (
	statusQueued    = "queued"
	statusCancelled = "cancelled"
	statusFailed    = "failed"
)

// Background is a response that is made while nobody waits for it.
type Background struct {
	kept *keptResponse
	all  *Kept
}

// Detach keeps a response that is about to be made in the background; cancel ends its making.
func (c *Call) Detach(cancel context.CancelFunc) *Background {
	f, _ := c.format.(*responsesFormat) // no other API has it
	r := &keptResponse{input: f.messages, cancel: cancel, status: statusQueued,
		body: f.body(statusQueued, []any{}, nil)}
	if c.Stream {
		r.events = &Events{more: make(chan struct{})}
	}
	c.kept.mu.Lock()
	defer c.kept.mu.Unlock()
	c.kept.all[c.id] = r
	return &Background{r, c.kept}
}

// Body is the response as it is now.
func (b *Background) Body() any { return b.all.shown(b.kept) }

// Events are those of the response's stream, nil if it has none.
func (b *Background) Events() *Events { return b.kept.events }

// End notes that nothing more comes.
func (b *Background) End(failed bool) {
	b.all.mu.Lock()
	if failed && b.kept.status == statusQueued {
		b.kept.status = statusFailed
	}
	b.all.mu.Unlock()
	if b.kept.events != nil {
		b.kept.events.end()
	}
}

func (k *Kept) shown(r *keptResponse) python.Object {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r.status == "" {
		return r.body
	}
	return r.body.With(python.Object{"status", r.status})
}

// Retrieve returns a response, or the events of its stream.
func (k *Kept) Retrieve(id string, stream bool) (any, *Events, *Error) {
	r, bad := k.get(id)
	switch {
	case bad != nil:
		return nil, nil, bad
	case !stream:
		return k.shown(r), nil, nil
	case r.events == nil:
		return nil, nil, BadRequest("response_id", "Unknown response_id: %s", id)
	}
	return nil, r.events, nil
}

// Cancel ends the making of a response in the background.
func (k *Kept) Cancel(id string) (any, *Error) {
	r, bad := k.get(id)
	if bad != nil {
		return nil, bad
	}
	k.mu.Lock()
	running := r.status == statusQueued
	if running {
		r.status = statusCancelled
	}
	k.mu.Unlock()
	if !running {
		return nil, invalidResponse(http.StatusBadRequest, "response_id", "Cannot cancel a synchronous response.")
	}
	r.cancel()
	return k.shown(r), nil
}

// Events are a stream that several clients may read, also after its end. It is an http.ResponseWriter, for the SSE that
// writes it: one write is one event.
type Events struct {
	mu    sync.Mutex
	list  [][]byte
	ended bool
	more  chan struct{} // closed by the next event, or the end
}

// Header is of no use.
func (*Events) Header() http.Header { return http.Header{} }

// WriteHeader does nothing.
func (*Events) WriteHeader(int) {}

// Write adds an event.
func (e *Events) Write(event []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, bytes.Clone(event))
	close(e.more)
	e.more = make(chan struct{})
	return len(event), nil
}

func (e *Events) end() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = true
	close(e.more)
}

// Follow sends the events from the one with the number from on, until their end.
func (e *Events) Follow(ctx context.Context, w http.ResponseWriter, from int) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w)
	_ = flush.Flush()
	for {
		e.mu.Lock()
		events, more, ended := e.list[min(from, len(e.list)):], e.more, e.ended
		e.mu.Unlock()
		for _, event := range events {
			if _, err := w.Write(event); err != nil {
				return
			}
			_ = flush.Flush()
		}
		if from += len(events); ended {
			return
		}
		select {
		case <-more:
		case <-ctx.Done():
			return
		}
	}
}
