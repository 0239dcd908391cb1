// SPDX-License-Identifier: Apache-2.0

package record

import (
	"crypto/rand"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
)

// Options are the settings of [New].
type Options struct {
	// Header has the model, the share, and the policy with which decide.New is called.
	Header Header
	// Open makes a file. The recorder calls it, from one goroutine, for the first decision, when a file is full, and
	// again after a fault.
	Open     func() (io.WriteCloser, error)
	MaxBytes int64           // of a file; default [FileBytes]
	Failed   func(err error) // is told of a file that cannot be opened or written; nil: nobody is
}

// FileBytes is the size of a file after which another one is begun, unless Options.MaxBytes says otherwise.
const FileBytes = 64 << 20

const (
	queueMost  = 1024             // decisions that wait to be written
	heldMost   = 32 << 20         // bytes of requests that wait to be hashed
	bufferMost = 32 << 10         // bytes that are written at once
	pause      = 10 * time.Second // after a fault, before the next try
	interval   = 20 * time.Millisecond
)

// Recorder is a [decide.Recorder] that writes files. It samples families of prompts, so that conversations stay whole.
// The requests' goroutines copy figures; one of its own hashes prompts and writes. Where that is too slow, and while no
// file can be written, decisions are lost, and counted.
//
// A prompt is read until a moment after its request has ended, so the memory of a request's body must not be used again
// by those who make requests themselves.
type Recorder struct {
	o             Options
	sampler       sampler
	pool          sync.Pool
	queue         chan *decide.Recorded
	held          atomic.Int64
	written, lost atomic.Int64
	closing       chan struct{}
	closed        chan struct{}
}

// New starts a recorder. Close ends it.
func New(o Options) *Recorder {
	if o.MaxBytes <= 0 {
		o.MaxBytes = FileBytes
	}
	o.Header.Version, o.Header.Arch = Version, runtime.GOARCH
	r := &Recorder{o: o, sampler: newSampler(o.Header.Share), queue: make(chan *decide.Recorded, queueMost),
		closing: make(chan struct{}), closed: make(chan struct{})}
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	go r.run(&file{o: &r.o, hasher: newHasher(key), recorder: r})
	return r
}

// Sample implements [decide.Recorder].
func (r *Recorder) Sample(in *pdflow.PickInput) *decide.Recorded {
	if !r.sampler.takes(in) {
		return nil
	}
	x, _ := r.pool.Get().(*decide.Recorded)
	if x == nil {
		x = &decide.Recorded{}
	}
	return x
}

// End implements [decide.Recorder].
func (r *Recorder) End(x *decide.Recorded) {
	size := size(x)
	closing := false
	select {
	case <-r.closing: // nobody reads the queue any more
		closing = true
	default:
	}
	if r.held.Add(size) <= heldMost && !closing {
		select {
		case r.queue <- x:
			return
		default:
		}
	}
	r.held.Add(-size)
	r.lost.Add(1)
}

// Counts returns how many decisions were written, and how many were sampled and lost.
func (r *Recorder) Counts() (written, lost int64) { return r.written.Load(), r.lost.Load() }

// Close writes what waits, and closes the file. What ends later is lost. It may be called once.
func (r *Recorder) Close() {
	close(r.closing)
	<-r.closed
}

// run looks for decisions at intervals. To be woken for each one would cost its request more than all else.
func (r *Recorder) run(f *file) {
	defer close(r.closed)
	defer f.close()
	look := time.NewTicker(interval)
	defer look.Stop()
	for closing := false; ; {
		r.writeAll(f)
		f.flush()
		if closing {
			return
		}
		select {
		case <-look.C:
		case <-r.closing:
			closing = true
		}
	}
}

func (r *Recorder) writeAll(f *file) {
	for {
		select {
		case x := <-r.queue:
			r.write(f, x)
		default:
			return
		}
	}
}

func (r *Recorder) write(f *file, x *decide.Recorded) {
	f.add(x)
	r.held.Add(-size(x))
	engines, in := x.Engines, x.Input
	for role := range engines {
		clear(engines[role])
		engines[role] = engines[role][:0]
	}
	*x = decide.Recorded{Engines: engines, Input: decide.Input{Prefill: in.Prefill[:0], Decode: in.Decode[:0]}}
	r.pool.Put(x)
}

// size is how many bytes of memory a decision keeps from being freed.
func size(x *decide.Recorded) int64 {
	if x.Request == nil {
		return 0
	}
	return int64(len(x.Request.Body()))
}

// file is the file that is written, and where there is none, the wish for one.
type file struct {
	o        *Options
	recorder *Recorder
	hasher   hasher
	to       io.WriteCloser // nil: none is open
	began    time.Time
	encoder  *encoder
	prefixes beginnings
	buffer   []byte
	waiting  int64 // decisions in the buffer
	bytes    int64
	retry    time.Time
}

// add adds a decision to the buffer.
func (f *file) add(x *decide.Recorded) {
	if f.to == nil && !f.open(x.Time) {
		f.recorder.lost.Add(1)
		return
	}
	f.hasher.read(x.Request, &f.prefixes)
	if f.encoder.entry(x.Time.Sub(f.began), x, &f.prefixes) {
		f.waiting++
	} else {
		f.recorder.lost.Add(1)
	}
	f.buffer = append(f.buffer, f.encoder.out...)
	if len(f.buffer) >= bufferMost {
		f.flush()
	}
	if f.to != nil && f.bytes+int64(len(f.buffer)) >= f.o.MaxBytes {
		f.close()
	}
}

// open begins a file, at the time of its first decision.
func (f *file) open(now time.Time) (ok bool) {
	if time.Now().Before(f.retry) {
		return false
	}
	h := f.o.Header
	h.Began = now
	f.encoder = newEncoder()
	err := f.encoder.header(&h)
	if err == nil {
		f.to, err = f.o.Open()
	}
	if err != nil {
		f.failed(err)
		return false
	}
	f.began, f.bytes, f.buffer = now, 0, append(f.buffer[:0], f.encoder.out...)
	return true
}

func (f *file) failed(err error) {
	f.to, f.retry = nil, time.Now().Add(pause)
	f.recorder.lost.Add(f.waiting)
	f.waiting, f.buffer = 0, f.buffer[:0]
	if f.o.Failed != nil {
		f.o.Failed(err)
	}
}

// flush writes the buffer.
func (f *file) flush() {
	if f.to == nil || len(f.buffer) == 0 {
		return
	}
	if _, err := f.to.Write(f.buffer); err != nil {
		_ = f.to.Close() // the first error tells more
		f.failed(err)
		return
	}
	f.bytes += int64(len(f.buffer))
	f.recorder.written.Add(f.waiting)
	f.waiting, f.buffer = 0, f.buffer[:0]
}

func (f *file) close() {
	if f.flush(); f.to == nil {
		return
	}
	err := f.to.Close()
	if f.to = nil; err != nil {
		f.failed(err)
	}
}
