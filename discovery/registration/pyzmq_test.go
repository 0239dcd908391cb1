// SPDX-License-Identifier: Apache-2.0

package registration_test

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/registration"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

// The engines of this file's tests announce themselves by pyzmq and libzmq, as real ones do: testdata/p2pnccl.py and
// moriio.py.

// sender is the process of an engine that announces itself.
type sender struct {
	t    testing.TB
	cmd  *exec.Cmd
	in   io.WriteCloser
	errs bytes.Buffer
	over bool
}

// announce starts a script of testdata. want is what it reads first.
func announce(t testing.TB, python, script string, want obj) *sender {
	t.Helper()
	s := &sender{t: t, cmd: exec.Command(python, filepath.Join("testdata", script))}
	var err error
	s.in, err = s.cmd.StdinPipe()
	require.NoError(t, err)
	s.cmd.Stderr = &s.errs
	require.NoError(t, s.cmd.Start())
	t.Cleanup(s.kill)
	s.say(want)
	return s
}

// say changes what is announced.
func (s *sender) say(change obj) {
	s.t.Helper()
	raw, err := json.Marshal(change)
	require.NoError(s.t, err)
	_, err = s.in.Write(append(raw, '\n'))
	require.NoError(s.t, err)
}

// stop ends the announcements in order.
func (s *sender) stop() {
	s.t.Helper()
	s.over = true
	require.NoError(s.t, s.in.Close())
	require.NoError(s.t, s.cmd.Wait(), "%s", s.errs.String())
}

// signal sends the process a signal.
func (s *sender) signal(what os.Signal) error { return s.cmd.Process.Signal(what) }

// kill ends the process as it is.
func (s *sender) kill() {
	if !s.over {
		s.over = true
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	}
}

func p2pWant(proxy string, message obj) obj {
	return obj{"proxy": proxy, "identity": message["zmq_address"], "every": 0.1, "message": message}
}

func TestARealP2pNcclSender(t *testing.T) {
	t.Parallel()
	py := sharedtest.Python(t)
	for network, listen := range map[string]string{"IPv4": "127.0.0.1:0", "IPv6": "[::1]:0"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			s := start(t, registration.Options{Listen: listen, Expiry: 3 * time.Second})
			set, h := recorded(t, s)
			p := announce(t, py, "p2pnccl.py", p2pWant(s.Addr(), p2p("P", 1)))
			d := announce(t, py, "p2pnccl.py", p2pWant(s.Addr(), p2p("D", 2)))
			until(t, set, map[string]string{idOf(1): "prefill/ready", idOf(2): "decode/ready"})
			e := set.Load().Endpoints[0]
			assert.Equal(t, "http://10.0.1.1:20001", e.URL.String())
			assert.Equal(t, map[string]string{"zmqAddress": "10.0.1.1:21001"}, e.Attributes)

			time.Sleep(4500 * time.Millisecond)
			until(t, set, map[string]string{idOf(1): "prefill/ready", idOf(2): "decode/ready"}) // pings keep them
			p.say(obj{"message": p2p("D", 1)})
			until(t, set, map[string]string{idOf(1): "decode/ready", idOf(2): "decode/ready"})
			d.kill()
			h.until(t, map[string]string{idOf(1): "decode/ready", idOf(2): "decode/draining"})
			until(t, set, map[string]string{idOf(1): "decode/ready"})
			p.stop()
			until(t, set, map[string]string{})
			assert.Zero(t, s.Counts().Malformed)
			assert.Zero(t, s.Counts().Refused)
		})
	}
}

func TestARealMoRIIOSender(t *testing.T) {
	py := sharedtest.Python(t)
	message := obj{
		"type": "D", "http_address": "fd00::6:8200", "zmq_address": "host:fd00::6,handshake:6301,notify:61005",
		"dp_size": 2, "tp_size": 8, "transfer_mode": "WRITE",
	}
	// The engine may be there first: libzmq keeps what it has to say, and comes again.
	port, err := freeport.One()
	require.NoError(t, err)
	address := "127.0.0.1:" + port
	m := announce(t, py, "moriio.py", obj{"proxy": address, "every": 0.1, "message": message})
	time.Sleep(300 * time.Millisecond)
	s := start(t, registration.Options{Listen: address})
	set := watched(t, s)
	until(t, set, map[string]string{"[fd00::6]:8200": "decode/ready"})
	want := map[string]string{
		"zmqAddress": "host:fd00::6,handshake:6301,notify:61005", "handshakePort": "6301", "notifyPort": "61005",
		"tpSize": "8", "dpSize": "2", "mode": "write",
	}
	assert.Equal(t, want, set.Load().Endpoints[0].Attributes)
	assert.EqualValues(t, 1, s.Counts().Hellos)

	// An engine of the first releases, and one of a release to come.
	old := obj{
		"type": "register", "role": "P", "index": "1", "request_address": "http://10.0.0.5:8100/v1/completions",
		"handshake_port": 6301, "notify_port": 61005,
		"dp_size": 1, "tp_size": 8, "transfer_mode": "WRITE",
	}
	announce(t, py, "moriio.py", obj{"proxy": address, "every": 0.1, "message": old})
	until(t, set, map[string]string{"[fd00::6]:8200": "decode/ready", "10.0.0.5:8100": "prefill/ready"})
	next := maps.Clone(message)
	maps.Copy(
		next, obj{"node_hosts": []string{"fd00::6", "fd00::7"}, "limits": obj{"max_inflight": 4},
			"transfer_mode": "READ"},
	)
	m.say(obj{"message": next})
	want["mode"] = "read"
	require.NoError(t, set.WaitReady(t.Context(), func(snap *discovery.Snapshot) bool {
		for _, e := range snap.Endpoints {
			if e.ID == "[fd00::6]:8200" {
				return maps.Equal(want, e.Attributes)
			}
		}
		return false
	}))

	// The gateway starts anew at its address: nobody needs to be told.
	require.NoError(t, s.Close())
	again := start(t, registration.Options{Listen: address})
	until(t, watched(t, again), map[string]string{"[fd00::6]:8200": "decode/ready", "10.0.0.5:8100": "prefill/ready"})
	assert.Zero(t, s.Counts().Malformed+again.Counts().Malformed)
}
