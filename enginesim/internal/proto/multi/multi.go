// SPDX-License-Identifier: Apache-2.0

// Package multi is vLLM's MultiConnector over NixlConnector and ExampleConnector, in this order. See
// docs/protocols/multi.md.
package multi

import (
	"context"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/metrics"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/proto/nixl"
	"github.com/pdkit/pdkit/enginesim/internal/proto/sharedstorage"
)

// multi saves to both children and loads from the first that promises anything. If that load fails there is no second
// chance (docs/protocols/multi.md, recording 06).
//
// Config.Extra is that of both children.
type multi struct {
	nixl  *nixl.Connector
	store core.Connector
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	store, err := sharedstorage.Start(h)
	if err != nil {
		return nil, err
	}
	pull, err := nixl.New(h, false)
	if err != nil {
		return nil, err
	}
	return &multi{nixl: pull, store: store}, nil
}

func (c *multi) Begin(r *core.Generation) core.Transfer {
	return &combined{handoff: c.nixl.Begin(r), file: c.store.Begin(r)}
}

func (c *multi) Rejected(ctx context.Context, params core.Params) { c.nixl.Rejected(ctx, params) }
func (c *multi) Freeze(frozen bool)                               { c.nixl.Freeze(frozen) }
func (c *multi) Close()                                           { c.nixl.Close() }
func (c *multi) SideAddress() string                              { return c.nixl.SideAddress() }

func (c *multi) Metrics(p *metrics.Page) { c.nixl.Metrics(p) }

// combined is one request's side of both children.
type combined struct {
	handoff, file core.Transfer
	chosen        core.Transfer // that loads; nil if none does
}

func (t *combined) Arrived(ctx context.Context, s *core.Sequence) (string, error) {
	if a, ok := t.file.(core.Arrival); ok {
		return a.Arrived(ctx, s)
	}
	return "", nil
}

func (t *combined) External() bool { return t.handoff.External() || t.file.External() }

func (t *combined) Promised(s *core.Sequence) int {
	for _, child := range []core.Transfer{t.handoff, t.file} {
		if !child.External() {
			continue
		}
		upto := s.Prompt
		if p, ok := child.(core.Partial); ok {
			upto = p.Promised(s)
		}
		if upto > s.Computed {
			t.chosen = child
			return upto
		}
	}
	return 0
}

func (t *combined) Reported() (int, bool) {
	if t.chosen == nil {
		return 0, false
	}
	return t.chosen.Reported()
}

func (t *combined) Queued() { t.handoff.Queued() }

func (t *combined) Load(ctx context.Context, s *core.Sequence) error { return t.chosen.Load(ctx, s) }

func (t *combined) Dropped(release bool) { t.handoff.Dropped(release) }

func (t *combined) Prefilled(ctx context.Context, s *core.Sequence) {
	for _, child := range []core.Transfer{t.handoff, t.file} {
		if v, ok := child.(core.Saver); ok {
			v.Prefilled(ctx, s)
		}
	}
}

func (t *combined) Finished(s *core.Sequence, reason string) any {
	return t.handoff.Finished(s, reason)
}
