// SPDX-License-Identifier: Apache-2.0

package zmtp_test

import (
	"context"
	"io"
	"log"
	"net"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/internal/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// socket is one of an implementation that is not pdkit's.
func socket(t *testing.T, open func(context.Context, ...zmq4.Option) zmq4.Socket, address string) (zmq4.Socket, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := open(ctx, zmq4.WithLogger(log.New(io.Discard, "", 0)), zmq4.WithID(zmq4.SocketIdentity("10.0.1.2:21001")),
		zmq4.WithDialerMaxRetries(1))
	t.Cleanup(func() { _ = s.Close(); cancel() })
	return s, s.Dial("tcp://" + address)
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

	dealer, err := socket(t, zmq4.NewDealer, l.Addr().String())
	require.NoError(t, err)
	require.NoError(t, dealer.Send(zmq4.NewMsgString("ping")))
	assert.Equal(t, "ping", <-got, "the identity is no part of the message")

	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Write([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x00NULL" + string(make([]byte, 48)) +
		"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"))
	require.NoError(t, err)
	<-refused
	require.NoError(t, dealer.Send(zmq4.NewMsgString("again")))
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
	slow, err := socket(t, zmq4.NewDealer, l.Addr().String())
	require.NoError(t, err)
	quick, err := socket(t, zmq4.NewDealer, l.Addr().String())
	require.NoError(t, err)
	require.NoError(t, slow.Send(zmq4.NewMsgString("slow")))
	require.NoError(t, quick.Send(zmq4.NewMsgString("quick")))
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
	_, err = socket(t, zmq4.NewDealer, l.Addr().String())
	require.NoError(t, err)
	silent, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer silent.Close()
	began := time.Now()
	l.Close()
	assert.Less(t, time.Since(began), 5*time.Second)
}

func TestWhoTakesMessagesIsToldThatThePeerHasGone(t *testing.T) {
	for name, end := range map[string]func(s zmq4.Socket, l *zmtp.Listener){
		"it leaves": func(s zmq4.Socket, _ *zmtp.Listener) { _ = s.Close() },
		"Close":     func(_ zmq4.Socket, l *zmtp.Listener) { l.Close() },
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
			dealer, err := socket(t, zmq4.NewDealer, l.Addr().String())
			require.NoError(t, err)
			gone := <-peers
			select {
			case <-gone:
				assert.Fail(t, "it is here")
			default:
			}
			end(dealer, l)
			select {
			case <-gone:
			case <-time.After(20 * time.Second):
				assert.Fail(t, "nobody said so")
			}
		})
	}
}
