// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"os"
	"time"

	"github.com/fsnotify/fsnotify"
)

// patience is how many times Options.Quiet a reading is put off at most.
const patience = 10

// watcher tells when the file may have changed. It watches the folder, not the file: a rename over the file, or of the
// link that a ConfigMap's files go through, is an event of the folder, and ends a watch of the file itself.
type watcher struct {
	folder string
	opts   Options
	notify *fsnotify.Watcher // nil where the system gives none: then only the polling is left
}

func newWatcher(folder string, o Options) *watcher {
	w := &watcher{folder: folder, opts: o}
	if n, err := fsnotify.NewWatcher(); err == nil {
		w.notify = n
		w.attach()
	}
	return w
}

// attach watches the folder that is at the path now. It is repeated with each poll, for a folder that was not there, or
// was replaced; a folder that is watched already stays so.
func (w *watcher) attach() {
	if w.notify != nil {
		_ = w.notify.Add(w.folder) // the polling goes on in any case
	}
}

func (w *watcher) close() {
	if w.notify != nil {
		_ = w.notify.Close() // nothing to lose
	}
}

// settle waits until the file has been still for Options.Quiet, by its own time stamp: a poll may come in the midst of
// a change that nobody notified. It reports whether ctx still lives.
func (w *watcher) settle(ctx context.Context, path string) bool {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for range patience {
		info, err := os.Stat(path)
		if err != nil {
			break
		}
		age := time.Since(info.ModTime())
		if age < 0 || age >= w.opts.Quiet { // from another machine's clock, or still
			break
		}
		timer.Reset(w.opts.Quiet - age)
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
		}
	}
	return ctx.Err() == nil
}

// wait returns true when the file is to be read, false when ctx has ended.
func (w *watcher) wait(ctx context.Context) bool {
	poll := time.NewTimer(w.opts.Poll)
	defer poll.Stop()
	var events chan fsnotify.Event
	var errs chan error
	if w.notify != nil {
		events, errs = w.notify.Events, w.notify.Errors
	}
	var quiet <-chan time.Time
	var deadline time.Time
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-poll.C:
			w.attach()
			if quiet == nil { // else there is a change under way
				return true
			}
			continue
		case <-quiet:
			return true
		case _, open := <-events:
			if !open {
				events = nil
				continue
			}
		case _, open := <-errs: // most often lost events: what they were does not matter
			if !open {
				errs = nil
				continue
			}
		}
		now := time.Now()
		if quiet == nil {
			quiet, deadline = timer.C, now.Add(patience*w.opts.Quiet)
		}
		timer.Reset(min(w.opts.Quiet, max(deadline.Sub(now), 0)))
	}
}
