// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow/decide/record"
)

// recording says where decisions are recorded.
type recording struct {
	folder string // "": nowhere
	share  float64
}

const (
	recordBytes = 256 << 20 // of a model's files; when there are more, the oldest are removed
	recordFiles = 64        // the same
	recordTime  = "20060102T150405.000000Z"
	recordEnd   = ".jsonl"
)

func (r *recording) check() error {
	if !(r.share > 0 && r.share <= 1) && r.folder != "" {
		return &config.FieldError{Path: "-record-share", Problem: "is no share",
			Remedy: "write a number above 0, up to 1"}
	}
	if r.folder == "" {
		return nil
	}
	if info, err := os.Stat(r.folder); err != nil || !info.IsDir() {
		return &config.FieldError{Path: "-record-decisions", Problem: "is no folder",
			Remedy: "make it, or name another"}
	}
	return nil
}

// recorder starts to record a model's decisions; nil where they are not.
func (r *recording) recorder(m *model) *record.Recorder {
	if r.folder == "" {
		return nil
	}
	files := &recordedFiles{folder: r.folder, name: url.PathEscape(m.Model()) + "."}
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
	})
}

// recordedFiles are the files of one model: NAME.TIME.jsonl.
type recordedFiles struct{ folder, name string }

// open makes the next file, and removes the oldest ones where all together are too large.
func (f *recordedFiles) open() (io.WriteCloser, error) {
	f.tidy()
	name := f.name + time.Now().UTC().Format(recordTime) + recordEnd
	return os.OpenFile(filepath.Join(f.folder, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
}

// tidy leaves room for one more file. What cannot be listed or removed stays.
func (f *recordedFiles) tidy() {
	entries, err := os.ReadDir(f.folder) // in the order of names, so of times
	if err != nil {
		return
	}
	bytes, files := int64(record.FileBytes), 1
	for _, e := range slices.Backward(entries) {
		info, err := e.Info()
		if err != nil || !f.has(e.Name()) || !info.Mode().IsRegular() {
			continue
		}
		bytes += info.Size()
		if files++; bytes > recordBytes || files > recordFiles {
			_ = os.Remove(filepath.Join(f.folder, e.Name()))
		}
	}
}

// has reports whether a file is one of the model's.
func (f *recordedFiles) has(name string) bool {
	at, begins := strings.CutPrefix(name, f.name)
	at, ends := strings.CutSuffix(at, recordEnd)
	_, err := time.Parse(recordTime, at)
	return begins && ends && err == nil
}

// observeRecords counts what is recorded.
func (t *telemetry) observeRecords(models func() []*model) error {
	if t.meters == nil {
		return nil
	}
	_, err := t.meters.Meter(meterName).Int64ObservableCounter("pd.decisions.recorded", metric.WithUnit("{attempt}"),
		metric.WithDescription("Attempts whose decision was to be recorded: written to a file, or lost"),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			for _, m := range models() {
				if m.decision == nil || m.decision.recorder == nil {
					continue
				}
				written, lost := m.decision.recorder.Counts()
				for result, n := range map[string]int64{"written": written, "lost": lost} {
					o.Observe(n, metric.WithAttributes(attribute.String("gen_ai.request.model", m.Model()),
						attribute.String("pd.result", result)))
				}
			}
			return nil
		}))
	return err
}
