// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"os"
	"time"

	"github.com/fsnotify/fsnotify"
)

// patience bounds how long changes can delay a reading: this many times Options.Quiet.
const patience = 10

// watcher reports when the file may have changed. It watches the folder, not the file: replacing the file, or the link
// through which a ConfigMap's files are reached, is an event of the folder, and would end a watch of the file itself.
type watcher struct {
	folder string
	opts   Options
	notify *fsnotify.Watcher // nil if the system offers no notifications; then only polling is left
}

func newWatcher(folder string, o Options) *watcher {
	w := &watcher{folder: folder, opts: o}
	if n, err := fsnotify.NewWatcher(); err == nil {
		w.notify = n
		w.attach()
	}
	return w
}

// attach starts to watch the folder that is at the path now. It runs with each poll, since the folder may have been
// missing or replaced. Watching the same folder again changes nothing.
func (w *watcher) attach() {
	if w.notify != nil {
		_ = w.notify.Add(w.folder) // without it, polling goes on
	}
}

func (w *watcher) close() {
	if w.notify != nil {
		_ = w.notify.Close() // nothing to lose
	}
}

// settle waits until the file is unchanged for Options.Quiet, by its own time stamp, since a poll may come during a
// change without notifications. It returns false if ctx has ended.
func (w *watcher) settle(ctx context.Context, path string) bool {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for range patience {
		info, err := os.Stat(path)
		if err != nil {
			break
		}
		age := time.Since(info.ModTime())
		if age < 0 || age >= w.opts.Quiet { // the file is old enough, or its time is from another machine's clock
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

// wait returns true when it is time to read the file, and false when ctx has ended.
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
			if quiet == nil { // else a change is already being waited for
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
		case _, open := <-errs: // mostly lost events; their content does not matter
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
