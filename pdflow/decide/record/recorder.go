// SPDX-License-Identifier: Apache-2.0

package record

import (
	"crypto/rand"
	"fmt"
	"io"
	"math"
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
	// again after a fault. A file to which nothing could be written is closed like any other: its Close should remove
	// it. If a file has a method Gone() bool, it is asked before each round of writing; true: another one is begun.
	Open     func() (io.WriteCloser, error)
	MaxBytes int64           // of a file; default [FileBytes]
	Failed   func(err error) // is told of a file that cannot be opened, written or closed; nil: nobody is
	// Count is told how many more decisions were written, and lost. It is called concurrently, and also in the way of
	// requests. Nil: nobody is told.
	Count func(written, lost int64)
}

// FileBytes is the size of a file after which another one is begun, unless Options.MaxBytes says otherwise.
const FileBytes = 64 << 20

const (
	queueMost  = 1024             // decisions that wait to be written
	heldMost   = 32 << 20         // bytes of requests that wait to be hashed
	bufferMost = 32 << 10         // bytes that are written at once
	pause      = 10 * time.Second // after a fault, before the next try
	interval   = 20 * time.Millisecond
	closeMost  = 3 * time.Second // that Close waits for a disk
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
	idle          atomic.Bool   // run waits for wake
	wake          chan struct{} // has room for one
	held          atomic.Int64
	written, lost atomic.Int64
	closing       chan struct{}
	closed        chan struct{}
	once          sync.Once   // of Close
	ended         atomic.Bool // nobody reads the queue any more

	mu      sync.Mutex
	pending int64 // decisions that run has taken, and that are neither written nor lost yet
}

// New starts a recorder. Close ends it.
func New(o Options) *Recorder {
	if o.MaxBytes <= 0 {
		o.MaxBytes = FileBytes
	}
	o.Header.Version, o.Header.Arch, o.Header.Recorder = Version, runtime.GOARCH, rand.Text()
	r := &Recorder{o: o, sampler: newSampler(o.Header.Share), queue: make(chan *decide.Recorded, queueMost),
		wake: make(chan struct{}, 1), closing: make(chan struct{}), closed: make(chan struct{})}
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
	if r.held.Add(size) <= heldMost {
		select {
		case r.queue <- x:
			if r.idle.Load() && r.idle.CompareAndSwap(true, false) {
				select {
				case r.wake <- struct{}{}:
				default: // it is woken already
				}
			}
			if r.ended.Load() {
				r.drop()
			}
			return
		default:
		}
	}
	r.held.Add(-size)
	r.count(0, 1)
}

// Counts returns how many decisions were written, and how many were sampled and lost.
func (r *Recorder) Counts() (written, lost int64) { return r.written.Load(), r.lost.Load() }

func (r *Recorder) count(written, lost int64) {
	r.written.Add(written)
	r.lost.Add(lost)
	if r.o.Count != nil {
		r.o.Count(written, lost)
	}
}

// settle counts decisions that run has taken, but for those that Close has given up.
func (r *Recorder) settle(n int64, written bool) {
	r.mu.Lock()
	n = min(n, r.pending)
	r.pending -= n
	r.mu.Unlock()
	switch {
	case n == 0:
	case written:
		r.count(n, 0)
	default:
		r.count(0, n)
	}
}

// Close writes what waits, and closes the file. What ends later is lost. A disk that hangs keeps it for three seconds:
// what is not written by then is lost, Options.Failed is told, and the recorder's goroutine ends when the disk lets it.
func (r *Recorder) Close() {
	r.once.Do(func() {
		close(r.closing)
		late := time.NewTimer(closeMost)
		defer late.Stop()
		select {
		case <-r.closed:
		case <-late.C:
			r.settle(math.MaxInt64, false)
			r.failed(fmt.Errorf("the file cannot be closed within %s", closeMost))
		}
		r.ended.Store(true)
		r.drop()
	})
}

// drop loses what waits when nobody reads the queue any more.
func (r *Recorder) drop() {
	for {
		select {
		case x := <-r.queue:
			r.held.Add(-size(x))
			r.count(0, 1)
		default:
			return
		}
	}
}

func (r *Recorder) failed(err error) {
	if r.o.Failed != nil {
		r.o.Failed(err)
	}
}

// run looks for decisions at intervals while there are any, and is woken for the first one after a time without. To be
// woken for each one would cost its request more than all else.
func (r *Recorder) run(f *file) {
	defer close(r.closed)
	defer f.close()
	next := time.NewTimer(interval)
	defer next.Stop()
	for closing := false; ; {
		n := r.writeAll(f)
		f.flush()
		if closing {
			return
		}
		var later <-chan time.Time
		if n > 0 {
			next.Reset(interval)
			later = next.C
		} else if r.idle.Store(true); len(r.queue) > 0 { // it came just before
			r.idle.Store(false)
			continue
		}
		select {
		case <-later:
		case <-r.wake:
		case <-r.closing:
			closing = true
		}
	}
}

func (r *Recorder) writeAll(f *file) (n int) {
	for {
		select {
		case x := <-r.queue:
			r.mu.Lock()
			r.pending++
			r.mu.Unlock()
			r.write(f, x)
			n++
		default:
			return n
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
	first    time.Time      // when the first file began
	began    time.Time      // when the last one did
	encoder  *encoder
	prefixes beginnings
	buffer   []byte
	waiting  int64 // decisions in the buffer
	bytes    int64
	retry    time.Time
}

// add adds a decision to the buffer.
func (f *file) add(x *decide.Recorded) {
	if file, ok := f.to.(interface{ Gone() bool }); ok && len(f.buffer) == 0 && file.Gone() {
		f.close()
	}
	if f.to == nil && !f.open(x.Time) {
		f.recorder.settle(1, false)
		return
	}
	f.hasher.read(x.Request, &f.prefixes)
	if f.encoder.entry(x.Time.Sub(f.began), x, &f.prefixes) {
		f.waiting++
	} else {
		f.recorder.settle(1, false)
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
	if now.Before(f.began) { // it was decided before the last file began
		now = f.began
	}
	if f.first.IsZero() {
		f.first = now
	}
	h := f.o.Header
	h.Began, h.After = now, now.Sub(f.first)
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
	f.recorder.settle(f.waiting, false)
	f.waiting, f.buffer = 0, f.buffer[:0]
	f.recorder.failed(err)
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
	f.recorder.settle(f.waiting, true)
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
