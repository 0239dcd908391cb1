// SPDX-License-Identifier: Apache-2.0

package enginesim

import "context"

// multi saves to both children and loads from the first that promises anything. If
// that load fails there is no second chance (captures/multi/06).
//
// Config.Extra is that of both children.
type multi struct {
	nixl  *nixl
	store connector
}

func startMulti(h *host) (connector, error) {
	store, err := startSharedStorage(h)
	if err != nil {
		return nil, err
	}
	pull, err := startPull(h, false)
	if err != nil {
		return nil, err
	}
	return &multi{nixl: pull, store: store}, nil
}

func (c *multi) begin(r *kvRequest) transfer {
	return &combined{handoff: c.nixl.begin(r), file: c.store.begin(r)}
}

func (c *multi) rejected(ctx context.Context, params kvParams) { c.nixl.rejected(ctx, params) }
func (c *multi) freeze(frozen bool)                            { c.nixl.freeze(frozen) }
func (c *multi) close()                                        { c.nixl.close() }
func (c *multi) sideAddress() string                           { return c.nixl.sideAddress() }

func (c *multi) metrics(p *page) { c.nixl.metrics(p) }

// combined is one request's side of both children.
type combined struct {
	handoff, file transfer
	chosen        transfer // that loads; nil if none does
}

func (t *combined) arrived(ctx context.Context, s *sequence) (string, error) {
	if a, ok := t.file.(arrival); ok {
		return a.arrived(ctx, s)
	}
	return "", nil
}

func (t *combined) external() bool { return t.handoff.external() || t.file.external() }

func (t *combined) promised(s *sequence) int {
	for _, child := range []transfer{t.handoff, t.file} {
		if !child.external() {
			continue
		}
		upto := s.prompt
		if p, ok := child.(partial); ok {
			upto = p.promised(s)
		}
		if upto > s.computed {
			t.chosen = child
			return upto
		}
	}
	return 0
}

func (t *combined) reported() (int, bool) {
	if t.chosen == nil {
		return 0, false
	}
	return t.chosen.reported()
}

func (t *combined) queued() { t.handoff.queued() }

func (t *combined) load(ctx context.Context, s *sequence) error { return t.chosen.load(ctx, s) }

func (t *combined) dropped(release bool) { t.handoff.dropped(release) }

func (t *combined) prefilled(ctx context.Context, s *sequence) {
	for _, child := range []transfer{t.handoff, t.file} {
		if v, ok := child.(saver); ok {
			v.prefilled(ctx, s)
		}
	}
}

func (t *combined) finished(s *sequence, reason string) any { return t.handoff.finished(s, reason) }
