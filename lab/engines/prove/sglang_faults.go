// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/lab/internal/apis"
)

// sglangPatience is how long an engine may take to end what it was doing. SGLang looks every 4 s whether the client of
// a request without stream is still there (managers/tokenizer_manager.py, _wait_one_response).
const sglangPatience = 12 * time.Second

// sglangRelease is how long, in seconds, D keeps the memory of a request that it has given up, if P does not confirm
// that it writes no more, as a dead one does not (disaggregation/decode.py, resolve_deferred_releases). The default is
// 30.
const sglangRelease = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT=4"

// sglangLoad is what an engine has in hand, at this moment (GET /v1/loads). The gauges on /metrics rise and fall only
// with batches.
type sglangLoad struct {
	Running int `json:"num_running_reqs"`
	Waiting int `json:"num_waiting_reqs"` // in any queue, those of disaggregation among them
	Used    int `json:"num_used_tokens"`
	Disagg  struct {
		Bootstrap int `json:"prefill_bootstrap_queue_reqs"`
		Inflight  int `json:"prefill_inflight_queue_reqs"`
		Prealloc  int `json:"decode_prealloc_queue_reqs"`
		Transfer  int `json:"decode_transfer_queue_reqs"`
		Retracted int `json:"decode_retracted_queue_reqs"`
	} `json:"disaggregation"`
}

func readSGLangLoad(ctx context.Context, engine string) (load sglangLoad, err error) {
	content, err := get(ctx, engine+"/v1/loads", 10*time.Second)
	if err != nil {
		return load, err
	}
	var page struct{ Loads []sglangLoad }
	if err := json.Unmarshal(content, &page); err != nil || len(page.Loads) != 1 {
		return load, fmt.Errorf("GET /v1/loads answered %.200s, which is not the load of one rank", content)
	}
	return page.Loads[0], nil
}

// awaitLoad waits until an engine's load is accepted.
func awaitLoad(ctx context.Context, engine *process, what string, ok func(sglangLoad) bool) error {
	for end := time.Now().Add(sglangPatience); ; time.Sleep(100 * time.Millisecond) {
		load, err := readSGLangLoad(ctx, engine.url)
		if err == nil && ok(load) {
			return nil
		}
		if time.Now().After(end) {
			return errors.Join(fmt.Errorf("the %s engine %s: %+v", engine.Name, what, load), err)
		}
	}
}

// sglangScene is a fault in progress: a gateway, and a proxy between it and each engine.
type sglangScene struct {
	*sglangLab
	ctx      context.Context
	toP, toD *intercept
	gateway  string
	happened chan error // gets one value when the fault has happened
}

// sglangFault plays one fault and says what the client got.
type sglangFault struct {
	name    string
	play    func(s *sglangScene) (got string, err error)
	others  []discovery.Endpoint // further engines
	prefill time.Duration        // the gateway's prefill timeout; 0: its default
	last    bool                 // no pair is left
}

// playSGLangFaults starts engines as rarely as possible: the faults that kill an engine come last.
func (s *sglangLab) playSGLangFaults(ctx context.Context) error {
	fmt.Println("faults: what the client gets; afterwards no engine may hold anything, and the next request is served")
	var result error
	play := func(f sglangFault) {
		got, err := s.playSGLang(ctx, f)
		verdict := "ok"
		if err != nil {
			verdict = "NOT OK: " + strings.ReplaceAll(err.Error(), "\n", "\n      ")
			result = errNotProven
		}
		fmt.Printf("  %-62s %-45s %s\n", f.name, got, verdict)
	}
	for _, f := range []sglangFault{
		{name: "client leaves while decode waits for prefill", play: leavesBeforePrefill},
		{name: "client leaves while prefill waits for decode", play: leavesBeforeDecode},
		{name: "client leaves during the transfer (decode engine frozen)", play: leavesInTransfer},
		{name: "client leaves while decode streams", play: leavesStream},
		{name: "prefill leg broken off with decode in flight", play: breaksPrefill},
		{name: "decode engine frozen, prefill timeout of 4 s", play: freezesDecode, prefill: 4 * time.Second},
		{name: "decode engine killed while it streams", play: killsDecode, last: true},
	} {
		play(f)
	}
	begin := time.Now()
	if err := s.d.Kill(); err != nil && !s.d.Ended() {
		return err
	}
	fresh, err := sglangEndpoints(discovery.RolePrefill, discovery.RoleDecode)
	if err != nil {
		return err
	}
	other, spare := fresh[0], fresh[1]
	started, err := s.launch(ctx, []string{sglangRelease}, other, s.pair[1], spare)
	if err != nil {
		return err
	}
	s.d = started[1]
	fmt.Printf("  (a new decode engine at the same address, another one, and a second prefill engine, after %.0f s)\n",
		time.Since(begin).Seconds())
	play(sglangFault{name: "decode engine drains (SIGTERM) while it streams, another one is there", play: drainsDecode,
		others: []discovery.Endpoint{spare}})
	s.d, s.pair[1] = started[2], spare
	play(sglangFault{name: "prefill engine killed between the legs, another one is there", play: killsPrefill,
		others: []discovery.Endpoint{other}})
	s.p, s.pair[0] = started[0], other
	play(sglangFault{name: "prefill engine killed between the legs, the only one", play: killsOnlyPrefill, last: true})
	return result
}

func (s *sglangLab) playSGLang(ctx context.Context, f sglangFault) (got string, err error) {
	scene := &sglangScene{sglangLab: s, ctx: ctx, happened: make(chan error, 1)}
	if scene.toP, err = newIntercept(s.p.url); err != nil {
		return "", err
	}
	defer scene.toP.close()
	if scene.toD, err = newIntercept(s.d.url); err != nil {
		return "", err
	}
	defer scene.toD.close()
	p, d := s.pair[0], s.pair[1]
	if p.URL, err = url.Parse(scene.toP.url); err != nil {
		return "", err
	}
	if d.URL, err = url.Parse(scene.toD.url); err != nil {
		return "", err
	}
	gateway, err := s.startGateway(ctx, gatewayOptions{connector: "sglang", prefill: f.prefill,
		endpoints: append([]discovery.Endpoint{p, d}, f.others...)})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, stopGateway(gateway)) }()
	scene.gateway = gateway.url
	if got, err = f.play(scene); err != nil {
		return got, err
	}
	return got, scene.settled(f.last)
}

// settled requires that the engines which live hold nothing of the fault's requests, and that a new request is served
// as by one engine, unless no pair is left.
func (s *sglangScene) settled(last bool) error {
	for _, engine := range []*process{s.p, s.d} {
		if engine.Ended() {
			continue
		}
		err := awaitLoad(s.ctx, engine, "still holds a request", func(l sglangLoad) bool { return l == sglangLoad{} })
		if err != nil {
			return err
		}
		if err := engine.healthy(s.ctx); err != nil {
			return err
		}
	}
	if last {
		return nil
	}
	q := newQuestion(apis.Chat, false, 150, 16)
	one := askSGLang(s.ctx, s.one.url, q, nil)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(500 * time.Millisecond) {
		a := askSGLang(s.ctx, s.gateway, q, nil)
		wrong := a.differs(one)
		if wrong == "" && a.mode == "disaggregated" {
			return nil
		}
		if a.status == http.StatusOK || time.Now().After(end) {
			return fmt.Errorf("a new request afterwards: %s, %s", a, wrong)
		}
	}
}

// healthy waits until an engine makes a token for its health check, which may wait for its turn behind other work.
func (p *process) healthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, sglangPatience, errors.New("it makes no token"))
	defer cancel()
	return p.ready(ctx, p.url+"/health_generate")
}

// leaving sends a request whose client leaves when the fault has happened.
func (s *sglangScene) leaving(q question) (string, error) {
	ctx, leave := context.WithCancel(s.ctx)
	defer leave()
	got := make(chan *response, 1)
	go func() { got <- askSGLang(ctx, s.gateway, q, nil) }()
	select {
	case err := <-s.happened:
		leave()
		<-got
		return "the client has left", err
	case a := <-got:
		return a.String(), errors.New("the request ended before its client could leave")
	}
}

func waits(l sglangLoad) bool { return l.Waiting == 1 }

// leavesBeforePrefill holds P's leg up. D has its own, and waits.
func leavesBeforePrefill(s *sglangScene) (string, error) {
	s.toP.beforeRequest(func() error {
		s.happened <- awaitLoad(s.ctx, s.d, "does not wait", waits)
		return errors.New("dropped: its client has left")
	})
	return s.leaving(newQuestion(apis.Completions, false, 300, 16))
}

// leavesBeforeDecode holds D's leg up. P has its own, and waits for D's address.
func leavesBeforeDecode(s *sglangScene) (string, error) {
	s.toD.beforeRequest(func() error {
		s.happened <- awaitLoad(s.ctx, s.p, "does not wait", waits)
		return errors.New("dropped: its client has left")
	})
	return s.leaving(newQuestion(apis.Chat, true, 300, 16))
}

// leavesInTransfer freezes D once it has told P where its memory is. P computes and then cannot send.
func leavesInTransfer(s *sglangScene) (got string, err error) {
	s.toP.beforeRequest(func() error {
		err := awaitLoad(s.ctx, s.d, "does not wait", func(l sglangLoad) bool { return l.Disagg.Transfer == 1 })
		err = errors.Join(err, s.d.Signal(syscall.SIGSTOP))
		go func() {
			sends := func(l sglangLoad) bool { return l.Disagg.Inflight == 1 }
			s.happened <- errors.Join(err, awaitLoad(s.ctx, s.p, "sends nothing", sends))
		}()
		return nil
	})
	got, err = s.leaving(newQuestion(apis.SGLang, false, 3000, 16))
	return got, errors.Join(err, s.d.Signal(syscall.SIGCONT))
}

// leavesStream leaves when decode has streamed some tokens of many.
func leavesStream(s *sglangScene) (string, error) {
	ctx, leave := context.WithCancel(s.ctx)
	defer leave()
	events := 0
	a := askSGLang(ctx, s.gateway, newQuestion(apis.Chat, true, 300, 2000), func() {
		if events++; events == 20 {
			leave()
		}
	})
	if a.Whole || events < 20 {
		return a.String(), errors.New("the stream must be cut")
	}
	return fmt.Sprintf("the client has left after %d events", events), nil
}

// breaksPrefill breaks P's leg off when D waits for its KV. The gateway must cancel D, and try again with a new room.
func breaksPrefill(s *sglangScene) (string, error) {
	s.toP.beforeRequest(func() error {
		s.happened <- awaitLoad(s.ctx, s.d, "does not wait", waits)
		return errors.New("broken off")
	})
	return s.served(newQuestion(apis.Completions, true, 300, 16))
}

// served requires the reply of one engine, after the fault has happened.
func (s *sglangScene) served(q question) (string, error) {
	one := askSGLang(s.ctx, s.one.url, q, nil)
	for range 4 { // several prefill engines take turns
		a := askSGLang(s.ctx, s.gateway, q, nil)
		if wrong := a.differs(one); wrong != "" {
			return a.String(), fmt.Errorf("must be served as by one engine: %s", wrong)
		}
		select {
		case err := <-s.happened:
			return a.String() + ", right text", err
		default:
		}
	}
	return "", errors.New("the fault did not happen")
}

// freezesDecode stops D before it gets its leg. P waits for it, so it is the prefill leg whose time is over.
func freezesDecode(s *sglangScene) (got string, err error) {
	s.toD.beforeRequest(func() error {
		s.happened <- s.d.Signal(syscall.SIGSTOP)
		return nil
	})
	a := askSGLang(s.ctx, s.gateway, newQuestion(apis.Completions, false, 300, 16), nil)
	select {
	case err = <-s.happened:
	default:
		err = errors.New("decode has got no leg")
	}
	if err = errors.Join(err, s.d.Signal(syscall.SIGCONT)); err != nil {
		return a.String(), err
	}
	if a.status != http.StatusGatewayTimeout || a.took < 4*time.Second || a.took > 4*time.Second+slack {
		return a.String(), errors.New("the client must get 504 when the time is over")
	}
	return a.String(), nil
}

// drainsDecode tells D to end while it streams. SGLang lets requests run to their end, and is no longer well by its
// /health; those that come meanwhile must be served, by the other one or by both.
func drainsDecode(s *sglangScene) (string, error) {
	q := newQuestion(apis.Chat, true, 300, 500)
	one := askSGLang(s.ctx, s.one.url, q, nil)
	var began atomic.Bool
	s.toD.beforeRequest(func() error {
		began.Store(true)
		return nil
	})
	var meanwhile sync.WaitGroup
	var problem error
	served, events := 0, 0
	serve := func() {
		end := time.Now().Add(90 * time.Second)
		for ; !s.d.Ended() && s.ctx.Err() == nil && problem == nil; time.Sleep(200 * time.Millisecond) {
			q := newQuestion(apis.Chat, false, 100, 8)
			if wrong := askSGLang(s.ctx, s.gateway, q, nil).differs(askSGLang(s.ctx, s.one.url, q, nil)); wrong != "" {
				problem = fmt.Errorf("request %d that came meanwhile: %s", served+1, wrong)
			}
			if served++; time.Now().After(end) && problem == nil {
				problem = errors.New("the engine does not end")
			}
		}
	}
	for range 4 { // the decode engines take turns
		a := askSGLang(s.ctx, s.gateway, q, func() {
			if !began.Load() {
				return
			}
			if events++; events == 20 {
				problem = s.d.terminate()
				meanwhile.Go(serve)
			}
		})
		if events < 20 {
			continue
		}
		meanwhile.Wait()
		if problem != nil {
			return a.String(), problem
		}
		if wrong := a.differs(one); wrong != "" {
			return a.String(), fmt.Errorf("the stream must come to its end: %s", wrong)
		}
		if served < 5 {
			return a.String(), errors.New("the engine has ended at once")
		}
		return a.String() + ", right text", nil
	}
	return "", errors.New("the fault did not happen")
}

func killsDecode(s *sglangScene) (string, error) {
	q := newQuestion(apis.Chat, true, 300, 2000)
	one := askSGLang(s.ctx, s.one.url, q, nil)
	var killed error
	events := 0
	a := askSGLang(s.ctx, s.gateway, q, func() {
		if events++; events == 20 {
			killed = s.d.Kill()
		}
	})
	if a.status != http.StatusOK || a.Whole || a.Err == nil || a.Texts[0] == "" || !a.startsLike(one) {
		return a.String(), errors.New("the client must see a stream that is cut, and right so far")
	}
	return a.String() + ", right so far", killed
}

// killPrefill lets P accept its leg, and kills it before it has done anything, with D waiting.
func (s *sglangScene) killPrefill() {
	s.toP.beforeRequest(func() error {
		err := awaitLoad(s.ctx, s.d, "does not wait", waits)
		err = errors.Join(err, s.p.Signal(syscall.SIGSTOP))
		time.AfterFunc(300*time.Millisecond, func() { s.happened <- errors.Join(err, s.p.Kill()) })
		return nil
	})
}

func killsPrefill(s *sglangScene) (string, error) {
	s.killPrefill()
	return s.served(newQuestion(apis.Chat, false, 300, 16))
}

func killsOnlyPrefill(s *sglangScene) (string, error) {
	s.killPrefill()
	a := askSGLang(s.ctx, s.gateway, newQuestion(apis.Completions, false, 300, 16), nil)
	select {
	case err := <-s.happened:
		if a.status < 500 || a.took > 10*time.Second {
			return a.String(), errors.New("the client must get an error soon")
		}
		return a.String(), err
	case <-time.After(sglangPatience):
		return a.String(), errors.New("the fault did not happen")
	}
}
