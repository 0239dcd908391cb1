// SPDX-License-Identifier: Apache-2.0

package zmtp_test

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim/zmq"
	"github.com/pdkit/pdkit/internal/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// dealer is a DEALER socket that shares no code with the listener.
func dealer(t *testing.T, l *zmtp.Listener) *zmq.Socket {
	t.Helper()
	s, err := zmq.Dial(t.Context(), "DEALER", l.Addr().String(), "10.0.1.2:21001")
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestARouterHearsDealersAndNobodyElse(t *testing.T) {
	got, refused := make(chan string, 8), make(chan struct{}, 8)
	l, err := zmtp.Listen(t.Context(), "127.0.0.1:0", zmtp.Config{
		Socket: "ROUTER", Peers: []string{"DEALER"},
		Peer: func(<-chan struct{}) func([]byte) bool {
			return func(body []byte) bool { got <- string(body); return true }
		},
		Refused: func() { refused <- struct{}{} },
	})
	require.NoError(t, err)
	defer l.Close()

	peer := dealer(t, l)
	require.NoError(t, peer.Send([]byte("ping")))
	assert.Equal(t, "ping", <-got, "the identity is no part of the message")

	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Write([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x00NULL" + string(make([]byte, 48)) +
		"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"))
	require.NoError(t, err)
	<-refused
	require.NoError(t, peer.Send([]byte("again")))
	assert.Equal(t, "again", <-got)
}

func TestAPeerThatIsSlowlyReadHoldsUpItselfAlone(t *testing.T) {
	release, got := make(chan struct{}), make(chan string, 8)
	l, err := zmtp.Listen(t.Context(), "127.0.0.1:0", zmtp.Config{
		Socket: "ROUTER", Peers: []string{"DEALER"}, Refused: func() {},
		Peer: func(<-chan struct{}) func([]byte) bool {
			return func(body []byte) bool {
				text := string(body)
				if text == "slow" {
					<-release
				}
				got <- text
				return true
			}
		},
	})
	require.NoError(t, err)
	slow, quick := dealer(t, l), dealer(t, l)
	require.NoError(t, slow.Send([]byte("slow")))
	require.NoError(t, quick.Send([]byte("quick")))
	assert.Equal(t, "quick", <-got)
	close(release)
	assert.Equal(t, "slow", <-got)
	l.Close()
	l.Close() // twice is once
	assert.ErrorIs(t, l.Err(), zmtp.ErrClosed)
}

func TestCloseEndsPeersInAnyState(t *testing.T) {
	l, err := zmtp.Listen(t.Context(), "127.0.0.1:0",
		zmtp.Config{Socket: "ROUTER", Peers: []string{"DEALER"}, Refused: func() {},
			Peer: func(<-chan struct{}) func([]byte) bool { return func([]byte) bool { ; return true } }})
	require.NoError(t, err)
	dealer(t, l)
	silent, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer silent.Close()
	began := time.Now()
	l.Close()
	assert.Less(t, time.Since(began), 5*time.Second)
}

func TestWhoTakesMessagesIsToldThatThePeerHasGone(t *testing.T) {
	for name, end := range map[string]func(s *zmq.Socket, l *zmtp.Listener){
		"it leaves": func(s *zmq.Socket, _ *zmtp.Listener) { _ = s.Close() },
		"Close":     func(_ *zmq.Socket, l *zmtp.Listener) { l.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			peers := make(chan (<-chan struct{}), 1)
			l, err := zmtp.Listen(t.Context(), "127.0.0.1:0", zmtp.Config{
				Socket: "ROUTER", Peers: []string{"DEALER"}, Refused: func() {},
				Peer: func(gone <-chan struct{}) func([]byte) bool {
					peers <- gone
					return func([]byte) bool { return true }
				},
			})
			require.NoError(t, err)
			defer l.Close()
			peer := dealer(t, l)
			gone := <-peers
			select {
			case <-gone:
				assert.Fail(t, "it is here")
			default:
			}
			end(peer, l)
			select {
			case <-gone:
			case <-time.After(20 * time.Second):
				assert.Fail(t, "nobody said so")
			}
		})
	}
}
