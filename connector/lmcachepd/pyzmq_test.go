// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/lmcachepd"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

// The tests of this file send notices with pyzmq and msgspec, as LMCache does.

type sent struct {
	First string // the first message, in hexadecimal digits
	Lost  int    // how many connections were lost
}

// begin starts testdata/notify.py and returns a function that waits for its end.
func begin(t *testing.T, python string, want map[string]any) (end func() sent) {
	t.Helper()
	in, err := json.Marshal(want)
	require.NoError(t, err)
	ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
	cmd := exec.CommandContext(ctx, python, "testdata/notify.py")
	cmd.Stdin = bytes.NewReader(in)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(t, cmd.Start())
	return func() (s sent) {
		t.Helper()
		defer stop()
		require.NoError(t, cmd.Wait(), "%s", errs.String())
		require.NoError(t, json.Unmarshal(out.Bytes(), &s))
		return s
	}
}

func TestNoticesOfARealSender(t *testing.T) {
	py := sharedtest.Python(t)
	c := start(t, lmcachepd.Options{NotifyTimeout: limit(30 * time.Second)})
	const sessions = 500
	var ids []string
	var waits []func(context.Context) (connector.Event, error)
	for range sessions {
		s, wait, done := armed(t, c)
		t.Cleanup(func() { done(nil) })
		ids, waits = append(ids, s.ID), append(waits, wait)
	}
	got := begin(t, py, map[string]any{"address": c.Addr(), "ids": append(ids, "17"), "ranks": 2})()
	for i, wait := range waits {
		e, err := wait(t.Context())
		require.NoError(t, err)
		assert.Contains(t, string(e.Body), ids[i])
	}
	assert.Equal(t, hex.EncodeToString(notice(t, ids[0])), got.First, "what the other tests send is what LMCache sends")
	eventually(t, c, lmcachepd.Notices{Matched: 2 * sessions, Unknown: 2})
}

// P may run before the gateway does: libzmq keeps its messages and connects again.
func TestARealSenderThatIsThereFirst(t *testing.T) {
	py := sharedtest.Python(t)
	address := freePort(t)
	end := begin(t, py, map[string]any{"address": address, "ids": []string{"a", "b"}})
	time.Sleep(300 * time.Millisecond)
	c := start(t, lmcachepd.Options{NotifyListen: address})
	eventually(t, c, lmcachepd.Notices{Unknown: 2})
	end()
}

// An idle connection stays open for long, with heartbeats.
func TestARealSendersHeartbeats(t *testing.T) {
	py := sharedtest.Python(t)
	c := start(t, lmcachepd.Options{})
	got := begin(
		t, py, map[string]any{"address": c.Addr(), "ids": []string{"a"}, "ranks": 3, "hold": 4, "heartbeat": 400},
	)()
	assert.Zero(t, got.Lost)
	eventually(t, c, lmcachepd.Notices{Unknown: 3})
}

// BenchmarkNotices measures how fast a gateway reads a burst of notices from the library's PUSH socket.
func BenchmarkNotices(b *testing.B) {
	c := start(b, lmcachepd.Options{})
	push := pusher(b, c.Addr())
	raw := notice(b, strconv.Itoa(17))
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		push(raw)
		n++
	}
	eventually(b, c, lmcachepd.Notices{Unknown: int64(n)})
}
