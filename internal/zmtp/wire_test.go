// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// said is a connection whose other side has said all that it will say.
type said struct {
	net.Conn
	in  *bytes.Reader
	out bytes.Buffer
}

func (p *said) Read(b []byte) (int, error)       { return p.in.Read(b) }
func (p *said) SetWriteDeadline(time.Time) error { return nil }
func (p *said) Write(b []byte) (int, error)      { return p.out.Write(b) }

// Whatever a peer sends: no panic, no frame above the limit, and nothing is read from one that has not greeted as a
// PUSH socket.
func FuzzPeer(f *testing.F) {
	hello := append(append([]byte(nil), greeting[:]...), "\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"...)
	f.Add(append(hello, "\x00\x03abc\x01\x01x\x00\x01y\x02\x00\x00\x00\x00\x00\x00\x00\x02ab"...))
	f.Add(append(hello, "\x04\x09\x04PING\x00\x64ab\x04\x05\x04PING"...))
	f.Add(hello[:80])
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		p := &said{in: bytes.NewReader(raw)}
		r := bufio.NewReaderSize(p, 512)
		if err := handshake(p, r, "PULL", []string{"PUSH"}); err != nil {
			return
		}
		assert.True(t, bytes.HasPrefix(raw, []byte{0xff}))
		assert.Contains(t, string(raw[greetingSize:]), "PUSH")
		assert.True(t, bytes.HasSuffix(p.out.Bytes(), ready("PULL")))
		p.out.Reset()
		for {
			_, body, err := readFrame(r, nil)
			if err != nil {
				assert.True(t, errors.Is(err, errPeer) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF),
					"%v", err)
				return
			}
			assert.LessOrEqual(t, len(body), maxFrame)
		}
	})
}

// Only messages are anybody's to slow down: what else a peer may send for ever is bounded here.
func TestFramesThatAreNoMessageAreBounded(t *testing.T) {
	for what, frame := range map[string]string{"a message without end": "\x01\x01a",
		"heartbeats without a pause": "\x04\x07\x04PING\x00\x64"} {
		p := &said{in: bytes.NewReader(bytes.Repeat([]byte(frame), 1<<20))}
		err := readMessages(p, bufio.NewReader(p), func([]byte) { assert.Fail(t, "a message") })
		assert.ErrorIs(t, err, errPeer, what)
		assert.Less(t, p.out.Len(), 1<<20, what)
	}
	p := &said{in: bytes.NewReader([]byte(strings.Repeat("\x01\x01a", 60) + "\x00\x01b"))}
	got := 0
	err := readMessages(p, bufio.NewReader(p), func([]byte) { got++ })
	assert.ErrorIs(t, err, io.EOF)
	assert.Equal(t, 1, got)
}

func TestMessagesOfSeveralFramesAreNone(t *testing.T) {
	p := &said{in: bytes.NewReader([]byte("\x01\x01a\x01\x01b\x00\x01c\x00\x01d"))}
	var got []string
	err := readMessages(p, bufio.NewReader(p), func(body []byte) { got = append(got, string(body)) })
	assert.ErrorIs(t, err, io.EOF)
	assert.Equal(t, []string{"", "d"}, got)
}
