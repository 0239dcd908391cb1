// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/lab/internal/apis"
)

const (
	shortLease = 5 * time.Second
	slack      = 2 * time.Second // added to each timeout, since the machine may be busy
	// one more than a request of the greatest length takes, so that other prompts overwrite a freed block at once
	fewBlocks = 33
)

// playFaults causes the faults of real engines that a gateway can meet. They start engines as rarely as possible:
// faults that kill no engine come first, and all others that are needed are started together.
func playFaults(ctx context.Context, lab *lab, p, d *process) error {
	fmt.Println("faults: what the client gets, and whether the engines live on and serve the next request")
	var result error
	play := func(f fault, p, d *process, others ...*process) {
		got, err := lab.playFault(ctx, f, p, d, others...)
		verdict := "ok"
		if f.measured {
			verdict = "measured"
		}
		if err != nil {
			verdict = "NOT OK: " + strings.ReplaceAll(err.Error(), "\n", "\n      ")
			result = errNotProven
		}
		fmt.Printf("  %-68s %-45s %s\n", f.name, got, verdict)
	}
	play(frozenPrefill(), p, d)

	begin := time.Now()
	engines, err := lab.startEngines(ctx, engineOptions{role: "decode"},
		engineOptions{role: "prefill", lease: shortLease, blocks: fewBlocks},
		// the engine core in a process of its own, as it is by default: else vLLM has no drain
		engineOptions{role: "decode", more: []string{"VLLM_ENABLE_V1_MULTIPROCESSING=1", "--shutdown-timeout", "60"}})
	if err != nil {
		return err
	}
	fmt.Printf("  (two new decode engines, and a prefill engine with a lease of %s and %d blocks, after %.0f s)\n",
		shortLease, fewBlocks, time.Since(begin).Seconds())
	play(drainedDecode(d), p, engines[2])
	play(killedDecode(), p, d)
	d, small := engines[0], engines[1]

	play(killedPrefill(), p, d, small)
	for _, f := range []fault{unreachableDecode(), heldResponse(), droppedRequest(), frozenDecode(),
		heldAnswerUnbounded(), frozenDecodeUnbounded()} {
		play(f, small, d)
	}
	play(killedOnlyPrefill(), small, d)
	return result
}

func frozenPrefill() fault {
	const limit = 4 * time.Second
	return fault{
		name:     "prefill engine frozen between the legs",
		gateway:  gatewayOptions{decode: limit},
		question: newQuestion(apis.Completions, false, 300, 24),
		arrange: func(s *scene) {
			s.toP.afterAnswer(func() { s.happens(s.p.Signal(syscall.SIGSTOP)) })
		},
		judge: status(http.StatusGatewayTimeout, limit+slack),
	}
}

func killedDecode() fault {
	return fault{
		name:     "decode engine killed while it streams",
		question: newQuestion(apis.Chat, true, 300, 600),
		arrange:  func(s *scene) { s.inStream(func() { s.happens(s.d.Kill()) }) },
		judge: func(s *scene, a *response) error {
			if a.status != http.StatusOK || a.Whole || a.Err == nil || a.Text() == "" {
				return errors.New("the client must see a stream that is cut: not whole, not an error in its place")
			}
			next := ask(s.ctx, s.gateway.url, newQuestion(apis.Chat, false, 100, 4), nil)
			if next.status < 500 || s.p.Ended() || !answersOK(s.ctx, s.p.url+"/health") {
				return fmt.Errorf("without a decode engine a request gets %s, and the prefill engine must live", next)
			}
			return nil
		},
		deadly: true,
	}
}

// drainedDecode is told to end while it streams, with time for its requests. vLLM answers 500 to those that come
// meanwhile and is well by its /health, so the other decode engine must serve them.
func drainedDecode(other *process) fault {
	var questions []question // that come meanwhile
	var responses []*response
	return fault{
		name:     "decode engine drains (SIGTERM) while it streams, another one is there",
		gateway:  gatewayOptions{decodes: []string{other.url}},
		question: newQuestion(apis.Chat, true, 300, 600),
		arrange: func(s *scene) {
			s.inStream(func() {
				s.happens(s.d.terminate())
				s.hooks.Go(func() {
					end := time.Now().Add(90 * time.Second) // longer than the engine's own limit
					for ; !s.d.Ended() && s.ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
						if time.Now().After(end) {
							s.happens(errors.New("the engine does not end"))
							return
						}
						q := newQuestion(apis.Chat, false, 100, 8)
						questions = append(questions, q)
						responses = append(responses, ask(s.ctx, s.gateway.url, q, nil))
					}
				})
			})
		},
		judge: func(s *scene, a *response) error {
			if a.status != http.StatusOK || !a.Whole {
				return errors.New("the stream must come to its end")
			}
			if len(responses) < 5 {
				return errors.New("the engine has ended at once")
			}
			for i, q := range questions {
				reference, err := alone(s.ctx, s.p.url, q)
				if err != nil {
					return err
				}
				if r := responses[i]; r.status != http.StatusOK || r.Text() != reference {
					return fmt.Errorf("request %d of %d that came meanwhile: %s", i+1, len(responses),
						describe(r, reference))
				}
			}
			return nil
		},
		deadly: true,
	}
}

// inStream does something when D, and not another decode engine, has streamed some tokens of many.
func (s *scene) inStream(do func()) {
	var began atomic.Bool
	s.toD.beforeRequest(func() error {
		began.Store(true)
		return nil
	})
	events := 0
	s.onText = func() {
		if !began.Load() {
			return
		}
		if events++; events == 20 {
			do()
		}
	}
}

func killedPrefill() fault {
	return fault{
		name:     "prefill engine killed between the legs, another one is there",
		gateway:  gatewayOptions{lease: shortLease, handoff: 3 * time.Second},
		question: newQuestion(apis.Chat, false, 300, 24),
		arrange:  func(s *scene) { s.toP.afterAnswer(func() { s.happens(s.p.Kill()) }) },
		judge:    status(http.StatusOK, 20*time.Second),
	}
}

func killedOnlyPrefill() fault {
	return fault{
		name:     "prefill engine killed between the legs, the only one",
		question: newQuestion(apis.Completions, true, 300, 24),
		arrange:  func(s *scene) { s.toP.afterAnswer(func() { s.happens(s.p.Kill()) }) },
		judge: func(s *scene, a *response) error {
			if a.status < 500 {
				return errors.New("the client must get an error")
			}
			if _, err := alone(s.ctx, s.d.url, newQuestion(apis.Completions, false, 100, 8)); err != nil {
				return fmt.Errorf("the decode engine must live and serve: %w\n%s", err, s.d.Tail())
			}
			return nil
		},
		deadly: true,
	}
}

// unreachableDecode lets the handoff become old inside the gateway: the gateway has P's response, but its connection to
// D succeeds only when the lease is over.
func unreachableDecode() fault {
	return fault{
		name:     "decode engine out of reach until the lease is over, blocks reused",
		gateway:  gatewayOptions{lease: shortLease, connect: 10 * time.Second, handoff: 3 * time.Second},
		question: newQuestion(apis.Completions, false, 300, 24),
		arrange: func(s *scene) {
			s.toP.afterAnswer(func() {
				s.happens(s.toD.door.shut())
				s.hooks.Go(func() {
					s.happens(s.outlast())
					s.toD.door.open()
				})
			})
		},
		judge: rightOrError,
	}
}

// heldResponse delays P's response until the lease is over. The gateway cannot know when P finished. But if prefill +
// handoff are below the lease, it never uses such a response.
func heldResponse() fault {
	f := heldAnswerUnbounded()
	f.name = "prefill response held up past the lease, prefill + handoff < lease"
	f.gateway.prefill, f.gateway.handoff = 2*time.Second, 2*time.Second
	f.judge, f.measured = status(http.StatusGatewayTimeout, f.gateway.prefill+slack), false
	return f
}

func heldAnswerUnbounded() fault {
	return fault{
		name:     "prefill response held up past the lease, prefill timeout of 60 s",
		gateway:  gatewayOptions{lease: shortLease, handoff: 3 * time.Second},
		question: newQuestion(apis.Completions, false, 300, 24),
		arrange: func(s *scene) {
			s.hooks.Add(1)
			s.toP.afterAnswer(func() {
				defer s.hooks.Done()
				s.happens()
				s.happens(s.outlast())
			})
		},
		judge:    anything,
		measured: true,
	}
}

// droppedRequest delays the decode leg until the lease is over, and then breaks it off. If the gateway sent the same
// handoff again, the text would be wrong.
func droppedRequest() fault {
	return fault{
		name:     "decode leg held up past the lease and broken off, blocks reused",
		gateway:  gatewayOptions{lease: shortLease, handoff: 3 * time.Second},
		question: newQuestion(apis.Chat, true, 300, 24),
		arrange: func(s *scene) {
			s.toD.beforeRequest(func() error {
				s.happens(s.outlast())
				return errors.New("broken off")
			})
		},
		judge: status(http.StatusOK, 30*time.Second),
	}
}

// frozenDecode lets D receive the decode leg and then sleep until the lease is over. The timeout of the decode leg
// bounds it.
func frozenDecode() fault {
	f := frozenDecodeUnbounded()
	f.name = "decode engine frozen past the lease, decode timeout of 3 s"
	f.gateway.decode = 3 * time.Second
	f.judge, f.measured = status(http.StatusGatewayTimeout, f.gateway.decode+slack), false
	return f
}

func frozenDecodeUnbounded() fault {
	return fault{
		name:     "decode engine frozen past the lease, decode timeout of 60 s",
		gateway:  gatewayOptions{lease: shortLease, handoff: 3 * time.Second, decode: time.Minute},
		question: newQuestion(apis.Completions, false, 300, 24),
		arrange: func(s *scene) {
			s.toD.beforeRequest(func() error {
				s.happens(s.d.Signal(syscall.SIGSTOP))
				s.hooks.Go(func() { s.happens(s.outlast(), s.d.Signal(syscall.SIGCONT)) })
				return nil
			})
		},
		judge:    anything,
		measured: true,
	}
}

// status requires a status within a time; for 200 it also requires a whole response.
func status(want int, within time.Duration) func(*scene, *response) error {
	return func(_ *scene, a *response) error {
		if a.status != want || !a.Whole || a.took > within {
			return fmt.Errorf("must be %d within %s", want, within)
		}
		return nil
	}
}

// rightOrError requires a whole response or an error of the gateway. All faults check that the text is right.
func rightOrError(_ *scene, a *response) error {
	if a.status != http.StatusOK && a.status < 500 || !a.Whole {
		return errors.New("must be a whole response or an error")
	}
	return nil
}

func anything(*scene, *response) error { return nil }
