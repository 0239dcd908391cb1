// SPDX-License-Identifier: Apache-2.0

package proto_test

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// always is the life of an engine that neither freezes nor ends.
type always struct{}

func (always) Pass() bool   { return true }
func (always) Frozen() bool { return false }
func (always) Ended() error { return nil }

// newHost is an engine without a server.
func newHost(t *testing.T, model string, extra map[string]string) *proto.Host {
	t.Helper()
	c := core.New(core.Config{BlockSize: 4, Blocks: 16, BytesPerToken: 16, MaxRunning: 8, Lease: time.Minute},
		func() {})
	t.Cleanup(c.Close)
	return &proto.Host{
		ID: model, Model: model, Role: proto.RoleBoth, Extra: extra, SideChannel: "127.0.0.1:0",
		Handshake: 20 * time.Second, Core: c, Life: always{},
	}
}

func newWire(t *testing.T, model string, options proto.Options) (*proto.Wire, proto.Place) {
	t.Helper()
	w, err := proto.StartWire(newHost(t, model, nil).Settings(), options)
	require.NoError(t, err)
	t.Cleanup(w.Close)
	host, port := w.Side.Address()
	return w, proto.Place{Host: host, Port: strconv.Itoa(port)}
}

// room is the smallest protocol: P offers each prompt's KV under one name, and D reads it.
type room struct {
	core.NoConnector
	wire *proto.Wire
	from *proto.Place // of P; nil on P itself
}

type roomTransfer struct {
	core.NoTransfer
	room
}

func (c room) Begin(*core.Generation) core.Transfer { return roomTransfer{room: c} }
func (t roomTransfer) External() bool               { return t.from != nil }
func (t roomTransfer) Load(ctx context.Context, s *core.Sequence) error {
	return t.wire.ReadNamed(ctx, s, *t.from, "room")
}

func (t roomTransfer) Finished(s *core.Sequence, _ string) any {
	if t.from == nil {
		t.wire.Offer(s, "room")
	}
	return nil
}

func generate(ctx context.Context, c *core.Core, conn core.Connector) (string, error) {
	g := &core.Generation{ID: "a", Prompt: []int32{1, 2, 3, 4, 5, 6}, MaxTokens: 8, Children: 1}
	out, err := c.Generate(ctx, conn, g, nil)
	if err != nil {
		return "", err
	}
	return out.Text, nil
}

func TestKVIsReadByNameWhoeverComesFirst(t *testing.T) {
	for _, first := range []string{"offer", "read"} {
		t.Run(first, func(t *testing.T) {
			var p *proto.Wire
			came := make(chan struct{}, 1)
			named := func(pipe *core.Pipe, f core.Frame, m proto.AskMessage) {
				came <- struct{}{}
				p.Side.GiveOffered(pipe, f, m)
			}
			p, at := newWire(t, "tiny", proto.Options{Writes: true, Named: named})
			d, _ := newWire(t, "tiny", proto.Options{Writes: true})
			prefill := func() {
				_, err := generate(t.Context(), p.Core, room{wire: p})
				require.NoError(t, err)
			}
			type result struct {
				text string
				err  error
			}
			done := make(chan result, 1)
			decode := func() {
				text, err := generate(t.Context(), d.Core, room{wire: d, from: &at})
				done <- result{text, err}
			}
			if first == "offer" {
				prefill()
				decode()
			} else {
				go decode()
				<-came
				prefill()
			}
			got := <-done
			require.NoError(t, got.err)
			want, err := generate(t.Context(), newHost(t, "tiny", nil).Core, core.NoConnector{})
			require.NoError(t, err)
			assert.Equal(t, want, got.text, "the text of one engine alone")
			assert.EqualValues(t, 6, d.Core.Totals().ExternalKVTransfer)
			assert.Zero(t, p.Core.Totals().PinnedBlocks, "the lease ends with the read")
			assert.EqualValues(t, 1, p.Core.Totals().Transfers, "who writes counts")
			assert.Zero(t, d.Core.Totals().Transfers)
			assert.Empty(t, p.Core.Breaches(true))
		})
	}
}

func TestEnginesOfOtherModelsDoNotTalk(t *testing.T) {
	_, at := newWire(t, "tiny", proto.Options{})
	d, _ := newWire(t, "large", proto.Options{})
	_, err := d.Connect(t.Context(), at)
	failed, ok := errors.AsType[*core.LoadError](err)
	require.True(t, ok, "%v", err)
	assert.EqualValues(t, 1, failed.Failures)
}

func TestAReaderThatLeavesIsAnOrphan(t *testing.T) {
	left := make(chan string, 1)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	p, at := newWire(t, "tiny", proto.Options{
		Left:  func(name string) { left <- name },
		Named: func(*core.Pipe, core.Frame, proto.AskMessage) { leave() }, // it has asked
	})
	d, _ := newWire(t, "tiny", proto.Options{})
	_, err := generate(ctx, d.Core, room{wire: d, from: &at})
	assert.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, "room", <-left)
	assert.EqualValues(t, 1, p.Core.Totals().Orphans)
}

func TestStoresAreSharedByFolderSeedAndModel(t *testing.T) {
	dir, key, block := t.TempDir(), core.KeyOf([]int32{1, 2}), []byte("12345678")
	open := func(model, seed string) *proto.Store {
		s, err := proto.OpenStore(newHost(t, model, nil), dir, seed)
		require.NoError(t, err)
		return s
	}
	require.NoError(t, open("tiny", "0").Put(key, block))
	got, err := open("tiny", "0").Get(key, len(block))
	require.NoError(t, err)
	assert.Equal(t, block, got)
	for _, other := range []*proto.Store{open("tiny", "1"), open("large", "0")} {
		_, err := other.Get(key, len(block))
		assert.ErrorIs(t, err, proto.ErrGone)
		assert.Zero(t, other.Has([]core.TokenKey{key}))
	}
	_, err = open("tiny", "0").Get(key, 4)
	assert.ErrorIs(t, err, proto.ErrGone, "a block of another size")
}

func TestSettingsKeepTheirErrors(t *testing.T) {
	set := newHost(t, "tiny", map[string]string{"n": "2", "s": "0.5", "d": "3ms", "bad": "x",
		"soon": "soon"}).Settings()
	assert.Equal(t, 2, set.Count("n", 7))
	assert.Equal(t, 7, set.Count("none", 7))
	assert.Equal(t, 500*time.Millisecond, set.Seconds("s", 1))
	assert.Equal(t, 3*time.Millisecond, set.Duration("d"))
	assert.NoError(t, set.Err())
	set.Count("bad", 1)
	set.Duration("soon")
	assert.ErrorContains(t, set.Err(), "bad")
	assert.ErrorContains(t, set.Err(), "soon")
}
