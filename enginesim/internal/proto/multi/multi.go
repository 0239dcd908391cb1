// SPDX-License-Identifier: Apache-2.0

// Package multi is vLLM's MultiConnector over NixlConnector and ExampleConnector, in this order. See
// docs/protocols/multi.md.
package multi

import (
	"context"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/proto/nixl"
	"github.com/pdkit/pdkit/enginesim/internal/proto/sharedstorage"
)

// multi saves to both children and loads from the first that promises anything. If that load fails there is no second
// chance (docs/protocols/multi.md, recording 06).
//
// Config.Extra is that of both children.
type multi struct {
	*nixl.Connector
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
	return &multi{pull, store}, nil
}

func (c *multi) Begin(g *core.Generation) core.Transfer {
	return &combined{Transfer: c.Connector.Begin(g), file: c.store.Begin(g)}
}

// combined is one request's side of both children. The handoff's is embedded: it hears of all that has no method here.
type combined struct {
	core.Transfer
	file   core.Transfer
	chosen core.Transfer // that loads; nil if none does
}

func (t *combined) Arrived(ctx context.Context, s *core.Sequence) (string, error) {
	if a, ok := t.file.(core.Arrival); ok {
		return a.Arrived(ctx, s)
	}
	return "", nil
}

func (t *combined) External() bool { return t.Transfer.External() || t.file.External() }

func (t *combined) Promised(s *core.Sequence) int {
	for _, child := range []core.Transfer{t.Transfer, t.file} {
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

func (t *combined) Load(ctx context.Context, s *core.Sequence) error { return t.chosen.Load(ctx, s) }

func (t *combined) Prefilled(ctx context.Context, s *core.Sequence) {
	for _, child := range []core.Transfer{t.Transfer, t.file} {
		if v, ok := child.(core.Saver); ok {
			v.Prefilled(ctx, s)
		}
	}
}
