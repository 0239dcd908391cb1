// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/lab/internal/apis"
)

// fault is one thing that goes wrong during a request, and what the client must get in that case.
type fault struct {
	name     string
	gateway  gatewayOptions // playFault adds its engines
	question question
	// arrange sets the hooks that cause the fault.
	arrange func(s *scene)
	// judge says what is wrong with the response. A wrong text is always wrong, unless measured is set.
	judge func(s *scene, a *response) error
	// measured marks a fault that no gateway can prevent: a wrong text is reported, but the proof does not fail.
	measured bool
	// deadly faults kill an engine, so the gateway has no pair afterwards.
	deadly bool
}

// scene is a fault in progress. It has one prefill engine, perhaps a second one as an alternative, and one decode
// engine, and a proxy between each of them and the gateway.
type scene struct {
	ctx       context.Context
	p, d      *process
	toP, toD  *intercept
	gateway   *process
	reference string // the right text
	onText    func() // called when streamed text arrives
	lease     time.Duration
	played    bool           // the fault has happened
	hooks     sync.WaitGroup // hooks that still run
	mu        sync.Mutex     // guards played and problems
	problems  []error        // errors of the hooks
}

// happens records that the fault has happened, and the errors in causing it.
func (s *scene) happens(errs ...error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.played = true
	s.problems = append(s.problems, errs...)
}

func (s *scene) hasHappened() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.played
}

// outlast waits until the lease of a handoff that P has just given is over, and makes P use its blocks for other
// prompts. A decode engine that reads them now gets another prompt's KV, with status 200.
func (s *scene) outlast() error {
	before, err := readMetrics(s.ctx, s.p.url)
	if err != nil {
		return err
	}
	select {
	case <-s.ctx.Done():
		return s.ctx.Err()
	case <-time.After(s.lease + time.Second):
	}
	for range 6 {
		if _, err := alone(s.ctx, s.p.url, newQuestion(apis.Completions, false, 400, 1)); err != nil {
			return err
		}
	}
	after, err := waitFor(s.ctx, s.p.url, 3*time.Second, func(m metrics) bool { return rise(before, m, expired) > 0 })
	if err == nil && rise(before, after, expired) == 0 {
		err = errors.New("the prefill engine has counted no expired handoff")
	}
	return err
}

// playFault causes one fault. It returns what the client got and what is wrong.
func (l *lab) playFault(ctx context.Context, f fault, p, d *process, others ...*process) (got string, err error) {
	s := &scene{ctx: ctx, p: p, d: d, lease: f.gateway.lease}
	if s.toP, err = newIntercept(p.url); err != nil {
		return got, err
	}
	defer s.toP.close()
	if s.toD, err = newIntercept(d.url); err != nil {
		return got, err
	}
	defer s.toD.close()
	f.gateway.connector, f.gateway.prefills = "nixl", []string{s.toP.url}
	f.gateway.decodes = append(f.gateway.decodes, s.toD.url)
	source := p // the engine of the reference text, and of the check that all is well afterwards
	for _, other := range others {
		f.gateway.prefills, source = append(f.gateway.prefills, other.url), other
	}
	if s.gateway, err = l.startGateway(ctx, f.gateway); err != nil {
		return got, err
	}
	defer func() { err = errors.Join(err, stopGateway(s.gateway)) }()
	before, err := readMetrics(ctx, source.url)
	if err != nil {
		return got, err
	}
	if s.reference, err = alone(ctx, source.url, f.question); err != nil {
		return got, err
	}
	// D gets a request with each P first, since its first handshake with a dead one takes 5 s and blocks those behind
	// it.
	for range f.gateway.prefills {
		if err := s.settle(source); err != nil {
			return "", fmt.Errorf("before the fault: %w", err)
		}
	}
	f.arrange(s)
	a, err := s.askUntilPlayed(f.question, len(f.gateway.prefills)*len(f.gateway.decodes))
	got = describe(a, s.reference)
	if err != nil {
		return got, err
	}
	s.hooks.Wait()
	for _, engine := range []*process{p, d} {
		if !engine.Ended() {
			err = errors.Join(err, engine.Signal(syscall.SIGCONT))
		}
	}
	err = errors.Join(err, errors.Join(s.problems...), f.judge(s, a), wrong(a, s.reference, f.measured))
	if f.deadly {
		return got, err
	}
	if settleErr := s.settle(source); settleErr != nil {
		err = errors.Join(err, fmt.Errorf("after the fault: %w", settleErr))
	}
	if !f.measured && f.gateway.decode == 0 { // a decode engine that is slow may still read late, after the client left
		after, readErr := readMetrics(ctx, source.url)
		if n := rise(before, after, lateNotices); readErr == nil && n > 0 {
			readErr = fmt.Errorf("the prefill engine counted %d handoffs as read late or twice", n)
		}
		err = errors.Join(err, readErr)
	}
	return got, err
}

// askUntilPlayed asks until the fault has happened: the gateway uses several engines one after the other.
func (s *scene) askUntilPlayed(q question, pairs int) (a *response, err error) {
	for range 2 * pairs {
		a = ask(s.ctx, s.gateway.url, q, s.onText)
		if s.hasHappened() {
			return a, nil
		}
		if err := wrong(a, s.reference, false); err != nil || a.status != http.StatusOK {
			return a, errors.Join(errors.New("a request before the fault failed"), err)
		}
	}
	return a, errors.New("the fault did not happen")
}

func describe(a *response, reference string) string {
	switch {
	case a.status != http.StatusOK:
		return a.String()
	case a.Text() == reference:
		return a.String() + ", right text"
	case strings.HasPrefix(reference, a.Text()):
		return a.String() + ", right so far"
	default:
		return a.String() + ", WRONG TEXT"
	}
}

// wrong refuses a response that looks complete but has another text.
func wrong(a *response, reference string, measured bool) error {
	switch {
	case a.status != http.StatusOK && (!a.Whole || a.Err == nil):
		return fmt.Errorf("status %d without an error object", a.status)
	case a.status == http.StatusOK && !strings.HasPrefix(reference, a.Text()) && !measured:
		return errors.New("WRONG TEXT")
	case a.status == http.StatusOK && a.Whole && a.Err == nil && a.Text() != reference && !measured:
		return errors.New("WRONG TEXT: short, yet it looks whole")
	}
	return nil
}

// settle shows that no engine has died: all are alive and healthy, and together they serve a new request. The gateway
// may need a moment to notice.
func (s *scene) settle(source *process) error {
	q := newQuestion(apis.Chat, false, 200, 16)
	reference, err := alone(s.ctx, source.url, q)
	if err != nil {
		return err
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(500 * time.Millisecond) {
		a := ask(s.ctx, s.gateway.url, q, nil)
		if err := wrong(a, reference, false); err != nil {
			return err
		}
		if a.status == http.StatusOK && a.Whole {
			break
		}
		if time.Now().After(end) {
			return fmt.Errorf("a good request still gets %s", a)
		}
	}
	for _, engine := range []*process{source, s.d} {
		if engine.Ended() || !answersOK(s.ctx, engine.url+"/health") {
			return fmt.Errorf("the %s engine is dead:\n%s", engine.Name, engine.Tail())
		}
	}
	return nil
}
