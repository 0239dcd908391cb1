// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

// The tests of this file subscribe to a publisher that is built on libzmq, as vLLM's is.

// realPublisher is a publisher in a process of its own.
type realPublisher struct {
	in             io.Writer
	cmd            *exec.Cmd
	Events, Replay int
}

func startReal(t *testing.T, options map[string]any) *realPublisher {
	t.Helper()
	text, err := json.Marshal(options)
	require.NoError(t, err)
	cmd := exec.Command(sharedtest.Python(t), "testdata/publisher.py", string(text))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	p := &realPublisher{in: in, cmd: cmd}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(line, p))
	return p
}

func (p *realPublisher) say(t *testing.T, command map[string]any) {
	t.Helper()
	text, err := json.Marshal(command)
	require.NoError(t, err)
	_, err = p.in.Write(append(text, '\n'))
	require.NoError(t, err)
}

func (p *realPublisher) endpoint(t *testing.T) discovery.Endpoint {
	t.Helper()
	a := map[string]string{"kvEventsReplay": fmt.Sprintf("tcp://127.0.0.1:%d", p.Replay)}
	if p.Events > 0 {
		a["kvEvents"] = fmt.Sprintf("tcp://127.0.0.1:%d", p.Events)
	}
	return endpoint(t, "p", a)
}

func TestARealPublisherIsReadWithoutAGap(t *testing.T) {
	for _, old := range []bool{false, true} {
		t.Run(fmt.Sprint("without topic frames: ", old), func(t *testing.T) {
			p := startReal(t, map[string]any{"old": old, "topic": "kv@p@m", "size": 300})
			p.say(t, map[string]any{"publish": 500})
			b := newBook()
			s := beginAt(t, &patient, b, nil, p.endpoint(t))
			p.say(t, map[string]any{"publish": 500, "pause": 0.001}) // while the subscription begins
			eventually(t, "all", func() bool { return b.exact(first, 1000) })
			assert.Equal(t, 1, b.get(first).replays, "no gap had to be mended")
			p.say(t, map[string]any{"skip": 3})
			p.say(t, map[string]any{"publish": 2})
			eventually(t, "the gap is filled", func() bool { return b.exact(first, 1005) })
			assert.Zero(t, s.Counts().Malformed+s.Counts().Failed)
		})
	}
}

// libzmq's ROUTER drops what is above its high-water mark, in the middle of a replay.
func TestAReplayOfAROUTERThatDropsGetsAll(t *testing.T) {
	p := startReal(t, map[string]any{"size": 20_000, "sndhwm": 100})
	p.say(t, map[string]any{"publish": 600})
	b := newBook()
	s := beginAt(t, &patient, b, nil, p.endpoint(t))
	eventually(t, "all", func() bool { return b.exact(first, 600) })
	assert.Zero(t, s.Counts().Failed)
}

func TestAKilledPublisherIsLostWithinASecond(t *testing.T) {
	p := startReal(t, map[string]any{})
	p.say(t, map[string]any{"publish": 3})
	b := newBook()
	beginAt(t, &patient, b, nil, p.endpoint(t))
	eventually(t, "exact", func() bool { return b.exact(first, 3) })
	require.NoError(t, p.cmd.Process.Kill())
	began := time.Now()
	eventually(t, "lost", func() bool { return b.get(first).lost })
	assert.Less(t, time.Since(began), time.Second)
}

func TestARealPublisherThatConnects(t *testing.T) {
	port := freePort(t)
	b := newBook()
	p := startReal(t, map[string]any{"connect": fmt.Sprintf("tcp://127.0.0.1:%d", port), "topic": "kv@p@m"})
	p.say(t, map[string]any{"publish": 5})
	s := begin(t, b, &Options{Listen: fmt.Sprintf("127.0.0.1:%d", port)}, p.endpoint(t))
	eventually(t, "it connects", func() bool {
		p.say(t, map[string]any{"publish": 1})
		return b.get(first).replays > 0
	})
	n := 0
	eventually(t, "all", func() bool { n = len(b.get(first).batches); return b.exact(first, n) && n > 5 })
	assert.EqualValues(t, 1, s.Counts().Streams)
}

func freePort(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}
