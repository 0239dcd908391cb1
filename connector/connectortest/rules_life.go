// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
)

func checkPrepareEnds(t *trial) error {
	pr, ok := connector.As[connector.Preparer](t.c)
	if !ok {
		return notApplicable("it makes no side call")
	}
	r := request(plain(t.apis[0]))
	for _, when := range []string{"that ends", "that has ended"} {
		ctx, cancel := context.WithCancel(t.ctx)
		if when == "that has ended" {
			cancel()
		}
		var called atomic.Bool
		var got error
		call := func(*http.Request) (*http.Response, error) {
			called.Store(true)
			cancel()
			<-ctx.Done() // as the flow's: it ends with the flow's context
			return nil, ctx.Err()
		}
		err := t.within("Prepare with a context "+when, func() error {
			_, got = pr.Prepare(ctx, t.session(r, 9000), call)
			return nil
		})
		cancel()
		if err != nil {
			return err
		}
		if called.Load() && got == nil {
			return fmt.Errorf("calling Prepare with a context %s: its side call failed, and yet it gave a value", when)
		}
	}
	if _, err := t.play(t.session(r, 9000)); err != nil {
		return fmt.Errorf("a later session, once another's side call had been given up: %w", err)
	}
	return t.anew(func(u *trial) error { return u.waitEnds(r) })
}

// waitEnds has a session come while another's side call gets no response, which both may share.
func (t *trial) waitEnds(r *connector.ClientRequest) error {
	pr, _ := connector.As[connector.Preparer](t.c)
	silent := func(ctx context.Context, asked chan<- struct{}) connector.Caller {
		return func(*http.Request) (*http.Response, error) {
			select {
			case asked <- struct{}{}:
			default:
			}
			<-ctx.Done()
			return nil, ctx.Err()
		}
	}
	asks, leave := context.WithCancel(t.ctx)
	asked, ended := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(ended)
		_ = guard(func() error { _, err := pr.Prepare(asks, t.session(r, 9001), silent(asks, asked)); return err })
	}()
	defer func() { leave(); <-ended }()
	err := t.within("Prepare of another session", func() error {
		select {
		case <-asked:
		case <-ended: // it asks nobody
		}
		return nil
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(t.ctx, 20*time.Millisecond)
	defer cancel()
	return t.within("Prepare with a context that ends while another session's side call has no response", func() error {
		_, _ = pr.Prepare(ctx, t.session(r, 9002), silent(ctx, nil))
		return nil
	})
}

func checkExpect(t *trial) error {
	e, ok := connector.As[connector.Expecter](t.c)
	if !ok {
		return notApplicable("it expects no event")
	}
	r := request(plain(t.apis[0]))
	prepared := func(n int) (*connector.Session, error) {
		s := t.session(r, n)
		_, err := t.before(s, t.means())
		return s, err
	}
	for n, failure := range []error{nil, errors.New("the legs failed")} {
		s, err := prepared(9100 + n)
		if err != nil {
			return err
		}
		err = t.within("done without wait", func() error {
			_, done := e.Expect(s)
			if done == nil {
				return errors.New("calling Expect gave no done")
			}
			done(failure)
			return nil
		})
		if err != nil {
			return err
		}
	}
	s, err := prepared(9102)
	if err != nil {
		return err
	}
	waits := false
	err = t.within("wait with a context that ends", func() error {
		wait, done := e.Expect(s)
		if done == nil {
			return errors.New("calling Expect gave no done")
		}
		defer done(context.Canceled)
		if wait == nil {
			return nil
		}
		waits = true
		ctx, cancel := context.WithTimeout(t.ctx, 20*time.Millisecond)
		defer cancel()
		if _, err := wait(ctx); err == nil {
			return errors.New("it gave an event that nobody sent")
		}
		if _, err := wait(canceled(t.ctx)); err == nil {
			return errors.New("with a context that had ended it gave an event that nobody sent")
		}
		return nil
	})
	if err == nil && !waits {
		return notApplicable("Expect waits for nothing with the harness's Config")
	}
	return err
}

// checkCleanup gives up what a failed session left, with engines that do not answer.
func checkCleanup(t *trial) error {
	cleaner, cleans := connector.As[connector.Cleaner](t.c)
	health, tells := connector.As[connector.HealthChecker](t.c)
	if !cleans && !tells {
		return notApplicable("it cleans nothing up, and has no health of its own")
	}
	r := request(plain(t.apis[0]))
	ctx, cancel := context.WithTimeout(t.ctx, 20*time.Millisecond)
	defer cancel()
	silent := func(*http.Request) (*http.Response, error) {
		<-ctx.Done() // as the flow's: it ends with the flow's context
		return nil, ctx.Err()
	}
	for n, cause := range []error{connector.ErrNoTransfer, context.Canceled} {
		s := t.session(r, 9200+n)
		for _, when := range []string{"before the legs", "after them"} {
			err := t.within("Clean "+when, func() error {
				if cleans {
					_ = cleaner.Clean(ctx, s, cause, silent) // a failure is told, and is nobody's panic
				}
				return nil
			})
			if err != nil {
				return err
			}
			if _, err := t.play(s); err != nil {
				return err
			}
		}
	}
	return t.within("HealthCheck", func() error {
		if tells {
			_ = health.HealthCheck(ctx)
		}
		return nil
	})
}

func checkStartClose(t *trial) error {
	starter, ok := connector.As[connector.Starter](t.c)
	closer, closes := connector.As[io.Closer](t.c)
	if !ok && !closes {
		return notApplicable("it opens nothing")
	}
	if ok && !closes {
		return errors.New("it is a Starter, but no io.Closer")
	}
	before := goroutines()
	if err := t.within("Close without Start", closer.Close); err != nil {
		return err
	}
	if ok {
		u, err := t.newTrial(t.ctx, false)
		if err != nil {
			return err
		}
		starter, _ = connector.As[connector.Starter](u.c)
		closer, _ = connector.As[io.Closer](u.c)
		if err := t.within("Start", func() error { return starter.Start(t.ctx) }); err != nil {
			return err
		}
		if err := t.within("a second Start", func() error {
			if err := guard(func() error { return starter.Start(t.ctx) }); panicked(err) {
				return err
			}
			return nil // refused or nothing: both are fine
		}); err != nil {
			return err
		}
		if err := t.within("Close", closer.Close); err != nil {
			return err
		}
		err = t.within("a second Close", func() error {
			if err := guard(closer.Close); panicked(err) {
				return err
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := t.within("Start with a context that has ended", func() error {
			return t.startCanceled()
		}); err != nil {
			return err
		}
	}
	return t.leaves(before)
}

// startCanceled starts with a context that has ended, which may fail, and closes what came of it.
func (t *trial) startCanceled() error {
	u, err := t.newTrial(t.ctx, false)
	if err != nil {
		return err
	}
	starter, _ := connector.As[connector.Starter](u.c)
	closer, _ := connector.As[io.Closer](u.c)
	if err := guard(func() error { return starter.Start(canceled(t.ctx)) }); panicked(err) {
		return err
	}
	return guard(closer.Close)
}

// goroutines returns the stacks of all goroutines by their ids.
func goroutines() map[string]string {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	m := map[string]string{}
	for stack := range strings.SplitSeq(string(buf), "\n\n") {
		id, _, _ := strings.Cut(strings.TrimPrefix(stack, "goroutine "), " ")
		m[id] = stack
	}
	return m
}

// leaves waits for goroutines that were not there before. Those of package testing are other tests.
func (t *trial) leaves(before map[string]string) error {
	var left string
	for end := time.Now().Add(t.Timeout); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		left = ""
		for id, stack := range goroutines() {
			if _, was := before[id]; !was && !strings.Contains(stack, "testing.tRunner") &&
				!strings.Contains(stack, "connectortest.goroutines") {
				left = stack
			}
		}
		if left == "" {
			return nil
		}
	}
	return fmt.Errorf("a goroutine is left after Close:\n%s", left)
}
