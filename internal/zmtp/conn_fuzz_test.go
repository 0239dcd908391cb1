// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func (p *said) SetReadDeadline(time.Time) error { return nil }

// Whatever a peer sends after its handshake: no panic, no message above the limits, no memory beyond what has come.
func FuzzConn(f *testing.F) {
	f.Add([]byte("\x01\x02kv\x01\x08\x00\x00\x00\x00\x00\x00\x00\x01\x00\x03\x93\xc0\xc0"))
	f.Add([]byte("\x04\x07\x04PING\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x02ab"))
	f.Add([]byte("\x02\x7f\xff\xff\xff\xff\xff\xff\xff"))
	f.Add([]byte("\x01\x01a\x04\x05\x04PONG\x00\x01b"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		p := &said{in: bytes.NewReader(raw)}
		c := newConn(p, bufio.NewReader(p), Limits{Frames: 3, Bytes: 1 << 12, Time: time.Second})
		for {
			if _, err := c.Wait(time.Now()); err != nil {
				return
			}
			frames, err := c.Read()
			if err != nil {
				assert.True(t, errors.Is(err, errPeer) || errors.Is(err, ErrTooMuch) || errors.Is(err, io.EOF) ||
					errors.Is(err, io.ErrUnexpectedEOF), "%v", err)
				return
			}
			assert.LessOrEqual(t, len(frames), 3)
			size := 0
			for _, frame := range frames {
				size += len(frame)
			}
			assert.LessOrEqual(t, size, 1<<12)
		}
	})
}
