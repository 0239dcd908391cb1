// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// response answers what names a response, and reports whether that is one of vLLM's paths and methods:
// GET /v1/responses/ID and POST /v1/responses/ID/cancel. It has no others.
func (n *Node) response(w http.ResponseWriter, r *http.Request) bool {
	id, below := strings.CutPrefix(r.URL.Path, "/v1/responses/")
	id, cancels := strings.CutSuffix(id, "/cancel")
	switch {
	case !below || id == "" || strings.Contains(id, "/") || id == "render":
		return false
	case cancels && r.Method == http.MethodPost:
		result, bad := n.cfg.API.Kept.Cancel(id)
		answer(w, result, bad)
		return true
	case cancels || r.Method != http.MethodGet:
		api.WriteError(w, &api.Error{Message: "Method Not Allowed", Type: "Method Not Allowed",
			Code: http.StatusMethodNotAllowed})
		return true
	}
	n.cfg.Received(r, nil)
	q := r.URL.Query()
	stream, _ := strconv.ParseBool(q.Get("stream"))
	body, events, bad := n.cfg.API.Kept.Retrieve(id, stream)
	if events == nil {
		answer(w, body, bad)
		return true
	}
	from := 0
	if after, err := strconv.Atoi(q.Get("starting_after")); err == nil && after >= 0 {
		from = after + 1
	}
	ctx, f, err := n.begin(r.Context()) // it ends with the engine
	if err != nil {
		n.refuseEnding(w, err)
		return true
	}
	defer n.finish(f)
	events.Follow(ctx, w, from)
	return true
}

func answer(w http.ResponseWriter, result any, bad *api.Error) {
	if bad != nil {
		api.WriteError(w, bad)
		return
	}
	api.WriteJSON(w, http.StatusOK, python.Encode(result))
}

// serveBackground answers with a response that is yet to be made, and makes it.
func (n *Node) serveBackground(ctx context.Context, w http.ResponseWriter, c *api.Call) {
	life, f, err := n.begin(context.WithoutCancel(ctx))
	if err != nil {
		n.refuseEnding(w, err)
		return
	}
	making := c.Detach(func() { f.cancel(context.Canceled) })
	n.background(func() {
		defer n.finish(f)
		making.End(n.make(life, c, making.Events()) != nil)
	})
	if events := making.Events(); events != nil {
		events.Follow(ctx, w, 0)
		return
	}
	answer(w, making.Body(), nil)
}

// make makes a response of which nobody waits for the end.
func (n *Node) make(ctx context.Context, c *api.Call, events *api.Events) error {
	if events == nil {
		outs, err := n.run(ctx, c, nil)
		if err == nil {
			c.Whole(outs)
		}
		return err
	}
	c.Begin(api.NewSSE(events))
	outs, err := n.run(ctx, c, func(st core.Step) error {
		c.Step(st)
		return nil
	})
	if err == nil {
		c.End(outs)
	}
	return err
}
