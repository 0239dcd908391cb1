// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/connector/config/yamlfile"
	"github.com/pdkit/pdkit/discovery"
)

// Options are settings of a [Source]. Zero values are the defaults.
type Options struct {
	// Poll is the period at which the file is read without any notification: file systems over a network, symbolic
	// links through other folders and folders that are replaced give none. Default 5 s.
	Poll time.Duration

	// Quiet is how long the folder must be still after a change, and the file by its time stamp, before the file is
	// read, so that a file being written is seen once, and whole. Endless changes put a reading off by no more than
	// twenty times as long. Default 50 ms.
	Quiet time.Duration
}

// Source publishes the list of one file.
//
// Whatever is wrong with the file (it cannot be read, its syntax, a field) leaves the last good list as it is. Watch
// then returns the reason, once, for the set's OnError; watched again, it publishes the last good list and waits for
// the next change. The reason names the file without its folder, lines and fields, never a value.
type Source struct {
	path string
	opts Options
	busy atomic.Bool

	// The rest belongs to the Watch that is under way, and outlives it.
	version uint64
	known   bool // there has been a good file
	good    []discovery.Endpoint
	last    []byte // the content that was read last, good or bad
	told    string // the fault of last, "" for a good file
}

var errBusy = errors.New("file: the source is being watched already")

// New returns a source of the endpoints in the file at path. The file need not be there yet: nothing is read before
// Watch.
func New(path string, o *Options) (*Source, error) {
	if path == "" {
		return nil, errors.New("file: the path is empty")
	}
	s := &Source{path: filepath.Clean(path)}
	if o != nil {
		s.opts = *o
	}
	if s.opts.Poll <= 0 {
		s.opts.Poll = 5 * time.Second
	}
	if s.opts.Quiet <= 0 {
		s.opts.Quiet = 50 * time.Millisecond
	}
	return s, nil
}

// Watch publishes the file's list whenever it changes, until ctx ends. One Watch at a time: a second one returns an
// error at once. Any other error is what is wrong with the file.
func (s *Source) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	if !s.busy.CompareAndSwap(false, true) {
		return errBusy
	}
	defer s.busy.Store(false)

	w := newWatcher(filepath.Dir(s.path), s.opts) // before the first reading, so that no change falls between
	defer w.close()
	first := true
	for {
		if !w.settle(ctx, s.path) {
			return nil
		}
		changed, err := s.read()
		if changed || first && s.known { // even where the file is bad now: each Watch begins with a whole list
			s.publish(publish)
		}
		first = false
		if err != nil {
			return err
		}
		if !w.wait(ctx) {
			return nil
		}
	}
}

func (s *Source) publish(publish func(discovery.Snapshot)) {
	s.version++
	publish(discovery.Snapshot{Version: s.version, Endpoints: s.good})
}

// read reports whether there is a new good list, and a fault that has not been told yet.
func (s *Source) read() (changed bool, err error) {
	data, err := load(s.path)
	if err == nil {
		if s.last != nil && bytes.Equal(data, s.last) {
			return false, nil // as it was, good or bad
		}
		s.last = data
		var list []discovery.Endpoint
		if list, err = Parse(data); err == nil {
			s.known, s.good, s.told = true, list, ""
			return true, nil
		}
	} else {
		s.last = nil // when it comes back as it was, that is news
	}
	if err.Error() == s.told {
		return false, nil
	}
	s.told = err.Error()
	stays := "there is no list yet"
	if s.known {
		stays = "the last good list stays"
	}
	return false, fmt.Errorf("file %q: %w (%s)", filepath.Base(s.path), err, stays)
}

// Load reads the file at path once, as a [Source] does: what it lists, or why a source would not take it. The error
// does not name the file.
func Load(path string) ([]discovery.Endpoint, error) {
	data, err := load(path)
	if err != nil {
		return nil, err
	}
	return Parse(data)
}

// load reads the file, which is bounded and must be one: opening a pipe would wait for its writer.
func load(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, unreadable(err)
	}
	defer f.Close()
	info, err := f.Stat() // of what is open: another may be at the path by now
	if err != nil {
		return nil, unreadable(err)
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("is not a file")
	}
	data, err := io.ReadAll(io.LimitReader(f, yamlfile.MaxBytes+1)) // one more than Parse takes
	if err != nil {
		return nil, unreadable(err)
	}
	return data, nil
}

// unreadable leaves the path out of an error: folders are nobody's business in a log.
func unreadable(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		err = pe.Err
	}
	return fmt.Errorf("cannot be read: %w", err)
}
