// SPDX-License-Identifier: Apache-2.0

// Package reread keeps what files say, and reads them again when they have changed.
package reread

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"syscall"
)

const maxBytes = 4 << 20 // of one file; the system's own authorities are 0.2 MB

// File is one of the files that belong together.
type File struct {
	What string // for errors: "CA file"
	Path string
}

// Files is what one or more files say together. Methods may be called concurrently.
type Files[T any] struct {
	files []File
	parse func(contents [][]byte) (T, error)

	mu    sync.Mutex
	infos []os.FileInfo // of the files that value was read from
	value T
}

// Open reads the files and parses their contents, which are in the files' order. Errors of reading name the file.
func Open[T any](parse func(contents [][]byte) (T, error), files ...File) (*Files[T], error) {
	f := &Files[T]{files: files, parse: parse}
	return f, f.read()
}

// Get returns what the files say. It reads them only if one has changed. While the new contents cannot be used (they
// may be half written), it returns the last that could.
func (f *Files[T]) Get() T {
	f.mu.Lock()
	defer f.mu.Unlock()
	_ = f.read() // what cannot be used now is tried again by the next Get
	return f.value
}

func (f *Files[T]) read() error {
	infos := make([]os.FileInfo, len(f.files))
	for i, file := range f.files {
		var err error
		if infos[i], err = os.Stat(file.Path); err != nil {
			return file.fault(err)
		}
	}
	if slices.EqualFunc(infos, f.infos, same) {
		return nil
	}
	contents := make([][]byte, len(f.files))
	for i, file := range f.files {
		var err error
		if contents[i], err = file.read(); err != nil {
			return file.fault(err)
		}
	}
	value, err := f.parse(contents)
	if err == nil {
		// Only what can be used is remembered. A file that was being written is read again by the next Get, whatever
		// the clock's resolution.
		f.value, f.infos = value, infos
	}
	return err
}

// read refuses what is no regular file: opening a pipe would wait for its writer.
func (f File) read() ([]byte, error) {
	file, err := os.OpenFile(f.Path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, errors.New("is not a file")
	case info.Size() > maxBytes:
		return nil, fmt.Errorf("has more than %d bytes", maxBytes)
	}
	return io.ReadAll(io.LimitReader(file, maxBytes))
}

// fault names the path once, since errors of package os have it, too.
func (f File) fault(err error) error {
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		err = pe.Err
	}
	return fmt.Errorf("%s %s: %w", f.What, f.Path, err)
}

// same returns false for a file that was written again, for another file at its path, and after a change of the
// symbolic links by which Kubernetes updates a Secret.
func same(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}
