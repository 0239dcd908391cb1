// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/discovery"
)

// Options are settings of a [Source]. Zero values are the defaults.
type Options struct {
	// Poll is how often the source reads the file without a notification. Network file systems, symbolic links through
	// other folders and replaced folders give no notifications. Default 5 s.
	Poll time.Duration

	// Quiet is how long the folder, and the file by its time stamp, must be unchanged before the source reads the file,
	// so that it does not read a half-written file. If changes never end, the source reads the file after twenty times
	// as long. Default 50 ms.
	Quiet time.Duration
}

// Source publishes the list of one file.
//
// If the file has a fault (it cannot be read, its syntax, a field), the source keeps the last good list. Watch then
// returns the fault, once, for the set's OnError. The next Watch publishes the last good list and waits for the next
// change. The error names the file without its folder, and lines and fields, but never a value.
type Source struct {
	path string
	opts Options
	busy atomic.Bool

	// The following fields belong to the running Watch, and keep their values for the next.
	version uint64
	known   bool // a good file has been read
	good    []discovery.Endpoint
	last    []byte // the content that was read last, with or without faults
	told    string // the fault of last, "" if it has none
}

var errBusy = errors.New("file: the source is being watched already")

// New returns a source of the endpoints in the file at path. The file may be missing: New reads nothing.
func New(path string, o *Options) (*Source, error) {
	if path == "" {
		return nil, errors.New("file: the path is empty")
	}
	return &Source{path: path, opts: o.withDefaults()}, nil
}

func (o *Options) withDefaults() Options {
	var out Options
	if o != nil {
		out = *o
	}
	out.Poll = cmp.Or(max(out.Poll, 0), 5*time.Second)
	out.Quiet = cmp.Or(max(out.Quiet, 0), 50*time.Millisecond)
	return out
}

// Watch publishes the file's list whenever it changes, until ctx ends. Only one Watch may run at a time; a second one
// returns an error at once. Any other error is a fault of the file.
func (s *Source) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	if !s.busy.CompareAndSwap(false, true) {
		return errBusy
	}
	defer s.busy.Store(false)

	first := true
	for data, err := range Contents(ctx, s.path, &s.opts) {
		changed, err := s.read(data, err)
		if changed || first && s.known { // each Watch begins with a whole list, even if the file has a fault now
			s.publish(publish)
		}
		first = false
		if err != nil {
			return err
		}
	}
	return nil
}

// Contents yields what is in the file at path: at once, and then whenever it may have changed, until ctx ends. It
// waits as [Options] says, so that nobody reads a half-written file, and yields the same content again after each
// [Options].Poll. The error says why the file cannot be read; it does not name the file. A nil o means the defaults.
func Contents(ctx context.Context, path string, o *Options) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		path := filepath.Clean(path)
		w := newWatcher(filepath.Dir(path), o.withDefaults()) // before the first reading, so that no change is missed
		defer w.close()
		for w.settle(ctx, path) && yield(load(path)) && w.wait(ctx) {
		}
	}
}

func (s *Source) publish(publish func(discovery.Snapshot)) {
	s.version++
	publish(discovery.Snapshot{Version: s.version, Endpoints: s.good})
}

// read reads what the file has now. changed is true if there is a new good list; fault is one that has not been
// reported yet.
func (s *Source) read(data []byte, err error) (changed bool, fault error) {
	if err == nil {
		if s.last != nil && bytes.Equal(data, s.last) {
			return false, nil // the same content as before
		}
		s.last = data
		var list []discovery.Endpoint
		if list, err = Parse(data); err == nil {
			s.known, s.good, s.told = true, list, ""
			return true, nil
		}
	} else {
		s.last = nil // if the same content comes back later, it counts as a change
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

// Load reads the file at path once, with the rules of a [Source]. The error does not name the file.
func Load(path string) ([]discovery.Endpoint, error) {
	data, err := load(path)
	if err != nil {
		return nil, err
	}
	return Parse(data)
}

// load reads the file up to a limit. It refuses what is no regular file: opening a pipe would wait for its writer.
func load(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, unreadable(err)
	}
	defer f.Close()
	info, err := f.Stat() // of the opened file, since another may be at the path by now
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

// unreadable removes the path from an error, since folders do not belong in a log.
func unreadable(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		err = pe.Err
	}
	return fmt.Errorf("cannot be read: %w", err)
}
