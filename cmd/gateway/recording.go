// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/pdflow/decide/record"
)

// recording says where decisions are recorded.
type recording struct {
	folder string // "": nowhere
	share  float64
	shared bool // share was given
}

const (
	recordBytes = 256 << 20 // of a model's files; when there are more, the oldest are removed
	recordLeast = 256 << 10 // that a file counts for, so that those of a gateway that starts again and again are few
	recordTime  = "20060102T150405.000000Z"
	recordEnd   = ".jsonl"
)

// check checks the flags when the program starts. A folder that is lost later ends no reload.
func (r *recording) check() error {
	fault := func(flag, problem, remedy string) error {
		return &config.FieldError{Path: flag, Problem: problem, Remedy: remedy}
	}
	if r.folder == "" {
		if r.shared {
			return fault("-record-share", "records nothing without -record-decisions", "name a folder with that")
		}
		return nil
	}
	if !(r.share > 0 && r.share <= 1) {
		return fault("-record-share", "is no share", "write a number above 0, up to 1")
	}
	if info, err := os.Stat(r.folder); err != nil || !info.IsDir() {
		return fault("-record-decisions", "is no folder", "make it, or name another")
	}
	try, err := os.CreateTemp(r.folder, ".pdkit-")
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return fault("-record-decisions", "is a folder that the gateway may not write to",
			"let it write there, or name another")
	}
	if err == nil { // a disk that is full is no reason not to serve
		_ = try.Close()
		_ = os.Remove(try.Name())
	}
	return nil
}

// note says so if there is nothing to record.
func (r *recording) note(cfg *configuration) {
	if r.folder == "" || cfg.gateway.ModelServers != nil || slices.ContainsFunc(cfg.models, (*modelServer).Decides) {
		return
	}
	cfg.notes = append(cfg.notes, note{withoutEffect, yamlfile.Fault{File: cfg.file, Line: 1,
		FieldError: &config.FieldError{Path: "-record-decisions", Problem: "no model has decisions to record",
			Remedy: "give one a spec.decision other than always, with dryRun: true if it is to change nothing"}}})
}

// recorder starts to record a model's decisions; nil where they are not.
func (r *recording) recorder(m *model, tel *telemetry) (*record.Recorder, error) {
	if r.folder == "" {
		return nil, nil
	}
	count, err := tel.records(m.Model())
	if err != nil {
		return nil, err
	}
	files := &recordedFiles{folder: r.folder, name: recordName(m.Model()) + "."}
	return record.New(record.Options{
		Header: record.Header{Model: m.Model(), Share: r.share, Policy: m.DecisionSpec(),
			DryRun: m.Spec.Decision.DryRun},
		Open: files.open,
		Failed: func(err error) {
			if at, ok := errors.AsType[*fs.PathError](err); ok {
				err = at.Err
			}
			m.probes.log.Warn("decisions are not recorded", "error", err)
		},
		Count: count,
	}), nil
}

// recordName is a model's name as its files have it: letters, digits and -_. stay as they are, which no file system and
// no shell minds. No two models have the same. One that is too long for a file's name ends with a hash, behind a
// character that no other has.
func recordName(model string) string {
	const longest = 90 // and what follows fits where a name has 143 bytes
	var b strings.Builder
	for i, c := range []byte(model) {
		if c == '_' || i > 0 && (c == '-' || c == '.') || c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	name := b.String()
	if len(name) > longest {
		sum := sha256.Sum256([]byte(model))
		name = fmt.Sprintf("%s~%x", name[:longest], sum[:8])
	}
	return name
}

// recordedFiles are the files of one model: NAME.TIME.jsonl.
type recordedFiles struct{ folder, name string }

// open makes the next file, and removes the oldest ones where all together are too large. Its time is behind those of
// all others, also if the clock was set back, so that the order of names is that in which they were made.
func (f *recordedFiles) open() (io.WriteCloser, error) {
	now := time.Now().UTC()
	if newest := f.tidy(); now.Before(newest) {
		now = newest
	}
	for ; ; now = now.Add(time.Microsecond) {
		path := filepath.Join(f.folder, f.name+now.Format(recordTime)+recordEnd)
		file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err == nil {
			return &recordedFile{file: file, path: path}, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
}

// tidy leaves room for one more file, and returns the time of the newest one. What cannot be listed or removed stays.
func (f *recordedFiles) tidy() (newest time.Time) {
	entries, err := os.ReadDir(f.folder) // in the order of names, so of times
	if err != nil {
		return newest
	}
	bytes := int64(record.FileBytes)
	for _, e := range slices.Backward(entries) {
		at, has := f.has(e.Name())
		info, err := e.Info()
		if err != nil || !has || !info.Mode().IsRegular() {
			continue
		}
		if newest.IsZero() {
			newest = at
		}
		if bytes += max(info.Size(), recordLeast); bytes > recordBytes {
			_ = os.Remove(filepath.Join(f.folder, e.Name()))
		}
	}
	return newest
}

// has reports whether a file is one of the model's, and its time.
func (f *recordedFiles) has(name string) (at time.Time, has bool) {
	text, begins := strings.CutPrefix(name, f.name)
	text, ends := strings.CutSuffix(text, recordEnd)
	at, err := time.Parse(recordTime, text)
	return at, begins && ends && err == nil
}

// recordedFile is a file that is written. One to which nothing could be written is removed by its Close.
type recordedFile struct {
	file *os.File
	path string
	size int64
}

func (f *recordedFile) Write(b []byte) (int, error) {
	n, err := f.file.Write(b)
	if err == nil {
		f.size += int64(n)
	}
	return n, err
}

// Gone reports whether somebody has moved, removed or emptied the file.
func (f *recordedFile) Gone() bool {
	own, err := f.file.Stat()
	there, errThere := os.Stat(f.path)
	return err != nil || errThere != nil || !os.SameFile(own, there) || there.Size() < f.size
}

func (f *recordedFile) Close() error {
	err := f.file.Close()
	if f.size == 0 {
		_ = os.Remove(f.path)
	}
	return err
}

// records returns what counts a model's recorded decisions. The counter is the program's, so that no reload of the
// configuration puts it back.
func (t *telemetry) records(model string) (count func(written, lost int64), err error) {
	if t.meters == nil {
		return nil, nil
	}
	counter, err := t.meters.Meter(meterName).Int64Counter("pd.decisions.recorded", metric.WithUnit("{attempt}"),
		metric.WithDescription("Attempts whose decision was to be recorded: written to a file, or lost"))
	if err != nil {
		return nil, err
	}
	result := func(name string) metric.MeasurementOption {
		return metric.WithAttributes(attribute.String("gen_ai.request.model", model),
			attribute.String("pd.result", name))
	}
	asWritten, asLost := result("written"), result("lost")
	count = func(written, lost int64) {
		counter.Add(context.Background(), written, asWritten)
		counter.Add(context.Background(), lost, asLost)
	}
	count(0, 0) // both are shown from the beginning
	return count, nil
}
