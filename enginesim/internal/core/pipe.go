// SPDX-License-Identifier: Apache-2.0

package core

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
)

// FrameKind says what a frame of a [Pipe] carries.
type FrameKind uint8

// Kinds of frames. Blocks are the KV itself; the others are the small talk of the two engines, with JSON as data.
const (
	FrameHello     FrameKind = iota + 1 // who is there, and the shape of its blocks
	FrameAsk                            // send me these blocks
	FrameBlock                          // one block of KV
	FrameError                          // an ask that cannot be answered
	FrameRelease                        // read or given up: let go of the blocks
	FrameReleased                       // reply to FrameRelease
	FrameHeartbeat                      // still wanted: extend the lease
	frameKindEnd
)

// Frame is one item of a [Pipe].
type Frame struct {
	Kind FrameKind
	// Transfer pairs the frames of one exchange.
	Transfer uint64
	// Key names the tokens whose KV this is.
	Key TokenKey
	// Index and Count say which block of how many this is.
	Index, Count uint32
	// Data is the KV of a block, or JSON.
	Data []byte
}

const (
	frameMagic  = 0x4b565031 // "KVP1"
	frameHeader = 48
	// MaxFrame is the most data one frame may carry, in bytes.
	MaxFrame = 16 << 20
)

// ErrFrame is the reason when what arrives on a pipe is not a frame.
var ErrFrame = errors.New("enginesim: malformed KV frame")

// Pipe is a KV pipe: a FIFO of frames over one connection, in both directions. Frames arrive in the order they were
// sent, whole or not at all. Send may be called by many goroutines at once; so may Recv, though the order is then only
// each caller's own. Close ends both.
type Pipe struct {
	conn io.ReadWriteCloser

	sending sync.Mutex
	w       *bufio.Writer
	wHead   [frameHeader]byte

	receiving sync.Mutex
	r         *bufio.Reader
	rHead     [frameHeader]byte
}

// NewPipe makes a pipe of a connection; the pipe owns it from then on.
func NewPipe(conn io.ReadWriteCloser) *Pipe {
	return &Pipe{conn: conn, w: bufio.NewWriterSize(conn, 32<<10), r: bufio.NewReaderSize(conn, 32<<10)}
}

// Send puts frames into the pipe, without other frames between them.
func (p *Pipe) Send(frames ...Frame) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	for i := range frames {
		if err := p.write(&frames[i]); err != nil {
			return err
		}
	}
	return p.w.Flush()
}

func (p *Pipe) write(f *Frame) error {
	if len(f.Data) > MaxFrame {
		return fmt.Errorf("%w: %d bytes of data", ErrFrame, len(f.Data))
	}
	h := p.wHead[:]
	binary.BigEndian.PutUint32(h, frameMagic)
	binary.BigEndian.PutUint32(h[4:], uint32(f.Kind))
	binary.BigEndian.PutUint64(h[8:], f.Transfer)
	binary.BigEndian.PutUint64(h[16:], f.Key[0])
	binary.BigEndian.PutUint64(h[24:], f.Key[1])
	binary.BigEndian.PutUint32(h[32:], f.Index)
	binary.BigEndian.PutUint32(h[36:], f.Count)
	binary.BigEndian.PutUint32(h[40:], uint32(len(f.Data)))
	binary.BigEndian.PutUint32(h[44:], crc32.ChecksumIEEE(f.Data))
	if _, err := p.w.Write(h); err != nil {
		return err
	}
	_, err := p.w.Write(f.Data)
	return err
}

// Recv takes the next frame out of the pipe. The error is io.EOF when the other side closed between two frames,
// [ErrFrame] when the bytes are no frame.
func (p *Pipe) Recv() (Frame, error) {
	p.receiving.Lock()
	defer p.receiving.Unlock()
	h := p.rHead[:]
	if _, err := io.ReadFull(p.r, h); err != nil {
		return Frame{}, err
	}
	f := Frame{
		Kind:     FrameKind(h[7]),
		Transfer: binary.BigEndian.Uint64(h[8:]),
		Key:      TokenKey{binary.BigEndian.Uint64(h[16:]), binary.BigEndian.Uint64(h[24:])},
		Index:    binary.BigEndian.Uint32(h[32:]),
		Count:    binary.BigEndian.Uint32(h[36:]),
	}
	kind, size := binary.BigEndian.Uint32(h[4:]), binary.BigEndian.Uint32(h[40:])
	switch {
	case binary.BigEndian.Uint32(h) != frameMagic:
		return Frame{}, fmt.Errorf("%w: wrong magic", ErrFrame)
	case kind == 0 || kind >= uint32(frameKindEnd):
		return Frame{}, fmt.Errorf("%w: unknown kind %d", ErrFrame, kind)
	case size > MaxFrame:
		return Frame{}, fmt.Errorf("%w: %d bytes of data", ErrFrame, size)
	case f.Kind == FrameBlock && f.Index >= f.Count:
		return Frame{}, fmt.Errorf("%w: block %d of %d", ErrFrame, f.Index, f.Count)
	}
	data, err := readData(p.r, int(size))
	if err != nil {
		return Frame{}, err
	}
	if crc32.ChecksumIEEE(data) != binary.BigEndian.Uint32(h[44:]) {
		return Frame{}, fmt.Errorf("%w: checksum", ErrFrame)
	}
	f.Data = data
	return f, nil
}

// readData reads size bytes, growing with what really arrives: a header alone must not make the reader allocate what it
// promises.
func readData(r io.Reader, size int) ([]byte, error) {
	const step = 64 << 10
	data := make([]byte, 0, min(size, step))
	for len(data) < size {
		n := min(size-len(data), max(len(data), step))
		at := len(data)
		data = append(data, make([]byte, n)...)
		if _, err := io.ReadFull(r, data[at:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return data, nil
}

// Close closes the connection. It may be called more than once.
func (p *Pipe) Close() error { return p.conn.Close() }
