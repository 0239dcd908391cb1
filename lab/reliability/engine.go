// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

// runEngine is this program as one engine. It reads its enginesim.Config from the first line of in, writes what others
// must know of it to out, and then a state for each further line, until in ends or SIGTERM comes.
func runEngine(in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	if !lines.Scan() {
		return errors.New("no configuration")
	}
	var cfg enginesim.Config
	if err := json.Unmarshal(lines.Bytes(), &cfg); err != nil {
		return err
	}
	e, err := enginesim.Start(cfg)
	if err != nil {
		return err
	}
	answers := json.NewEncoder(out)
	if err := answers.Encode(identity{e.URL(), e.EngineID(), e.Bootstrap()}); err != nil {
		return err
	}
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, syscall.SIGTERM)
	go func() {
		<-terminated
		e.Terminate()
		os.Exit(0) // with the end of its last response, as vLLM
	}()
	for lines.Scan() {
		var order injection
		if err := json.Unmarshal(lines.Bytes(), &order); err != nil {
			return err
		}
		if order.Kind != 0 {
			e.Inject(enginesim.Fault{Kind: order.Kind, Count: 1, AfterChunks: order.AfterChunks, Status: order.Status,
				Delay: order.Delay})
		}
		if err := answers.Encode(stateOf(e)); err != nil {
			return err
		}
	}
	return e.Close()
}

// identity is what others must know of an engine.
type identity struct{ URL, ID, Bootstrap string }

// injection asks an engine for a scripted fault; of kind 0 it asks for the state alone.
type injection struct {
	Kind                enginesim.FaultKind
	AfterChunks, Status int
	Delay               time.Duration
}

// state is what an engine has done in its life, and what it holds.
type state struct {
	Stats    enginesim.Stats
	Breaches map[enginesim.KVFaultKind]int // but leaks, which Stats.Expired counts
}

func stateOf(e *enginesim.Engine) state {
	s := state{Stats: e.Stats(), Breaches: map[enginesim.KVFaultKind]int{}}
	if joined, ok := e.CheckKV().(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			if f, ok := errors.AsType[*enginesim.KVFault](err); ok && f.Kind != enginesim.KVLeak {
				s.Breaches[f.Kind]++
			}
		}
	}
	return s
}

// engine is an engine as a process of its own, which can be killed, stopped and started again.
type engine struct {
	name   string
	role   string // prefill or decode
	host   *host  // nil: this process's own network
	config enginesim.Config
	self   string // this program

	// faults is held while a fault is played at the engine, so that there is one at a time.
	faults sync.Mutex

	mu      sync.Mutex
	cmd     *exec.Cmd
	orders  io.WriteCloser
	answers *bufio.Reader
	id      identity
	exited  chan struct{}
	last    state // of this life
	past    state // of the lives before it, their sum
	lives   int
}

// start starts a life of the engine.
func (e *engine) start() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	cmd := exec.CommandContext(context.Background(), e.self, "engine") // #nosec G204 -- this program itself
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if e.host != nil {
		err = e.host.start(cmd)
	} else {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("engine %s: %w", e.name, err)
	}
	e.cmd, e.orders, e.answers, e.exited = cmd, in, bufio.NewReader(out), make(chan struct{})
	e.last = state{}
	e.lives++
	if err := json.NewEncoder(in).Encode(e.config); err != nil {
		return err
	}
	line, err := e.answers.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("engine %s does not start: %w", e.name, errors.Join(err, cmd.Wait()))
	}
	go func(exited chan struct{}) {
		_ = cmd.Wait() // it is killed at any time
		close(exited)
	}(e.exited)
	return json.Unmarshal(line, &e.id)
}

// ask gives the engine an order and returns its state. It must run and must not be stopped.
func (e *engine) ask(order injection) (state, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := json.NewEncoder(e.orders).Encode(order); err != nil {
		return state{}, err
	}
	line, err := e.answers.ReadBytes('\n')
	if err != nil {
		return state{}, err
	}
	var s state
	if err := json.Unmarshal(line, &s); err != nil {
		return state{}, err
	}
	e.last = s
	return s, nil
}

// end ends the life of the engine by a signal, and keeps what it told last.
func (e *engine) end(sig syscall.Signal) {
	_, _ = e.ask(injection{}) // what a life did is not lost with it
	e.mu.Lock()
	defer e.mu.Unlock()
	_ = e.cmd.Process.Signal(sig)
	<-e.exited
	e.past = e.past.plus(e.last)
	e.last = state{}
}

func (e *engine) signal(sig syscall.Signal) {
	e.mu.Lock()
	defer e.mu.Unlock()
	_ = e.cmd.Process.Signal(sig)
}

// url is where the engine is now.
func (e *engine) url() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.id.URL
}

func (e *engine) bootstrap() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.id.Bootstrap
}

// total is what all lives of the engine have done.
func (e *engine) total() state {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.past.plus(e.last)
}

// plus adds what engines have done. What they hold now is that of b.
func (s state) plus(b state) state {
	sum := state{Stats: b.Stats, Breaches: map[enginesim.KVFaultKind]int{}}
	sum.Stats.Transfers += s.Stats.Transfers
	sum.Stats.Expired += s.Stats.Expired
	sum.Stats.Requests += s.Stats.Requests
	sum.Stats.ExternalKVTransfer += s.Stats.ExternalKVTransfer
	sum.Stats.LocalCompute += s.Stats.LocalCompute
	for _, from := range []map[enginesim.KVFaultKind]int{s.Breaches, b.Breaches} {
		for kind, n := range from {
			sum.Breaches[kind] += n
		}
	}
	return sum
}
