// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

const (
	// startTime is how long a gateway may take to serve its first request.
	startTime = 60 * time.Second
	// soon is how long a gateway may take to pass on what it has, or that a client has left.
	soon = time.Second
	// pace is the time between two tokens of a decode engine.
	pace = 2 * time.Millisecond

	model       = "tiny"
	completions = "/v1/completions"
	chats       = "/v1/chat/completions"
)

// Scene is two prefill and two decode engines, and a gateway in front of them.
type Scene struct {
	P, D    []*enginesim.Engine
	alone   *enginesim.Engine // serves whole requests, for the right text; the gateway does not know it
	gateway *Instance
	ready   string
	client  *http.Client

	requests map[*enginesim.Engine]int   // how many each engine had received when the case began
	faults   map[string]bool             // of KV that were known then
	tokens   map[*enginesim.Engine]int64 // that each had made
}

func newScene(ctx context.Context, g Gateway) (*Scene, error) {
	s := &Scene{ready: g.Ready(), client: &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 100, IdleConnTimeout: 4 * time.Second}, // less than the 5 s of engines
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
	if err := s.start(ctx, g); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *Scene) start(ctx context.Context, g Gateway) error {
	listen := [2][]string{{"", ""}, {"", ""}}
	if r, ok := g.(*Running); ok {
		listen = [2][]string{r.Prefill, r.Decode}
	}
	config := enginesim.Config{Model: model, Seed: 1, BytesPerToken: 8, BlockSize: 128, Blocks: 1 << 14,
		MaxModelLen: 1 << 21, Connector: "nixl", APIServers: apiServers,
		KeepResponses: true}
	for side, addresses := range listen {
		for _, address := range addresses {
			c := config
			c.Listen, c.KVRole = address, enginesim.RoleProducer
			if side == 1 {
				c.KVRole, c.ITL = enginesim.RoleConsumer, pace
			}
			e, err := enginesim.Start(c)
			if err != nil {
				return err
			}
			if side == 0 {
				s.P = append(s.P, e)
			} else {
				s.D = append(s.D, e)
			}
		}
	}
	config.Connector = "none"
	var err error
	if s.alone, err = enginesim.Start(config); err != nil {
		return err
	}
	if s.gateway, err = g.Start(ctx, urls(s.P), urls(s.D)); err != nil {
		return err
	}
	return s.renew(ctx)
}

func urls(engines []*enginesim.Engine) (all []string) {
	for _, e := range engines {
		all = append(all, e.URL())
	}
	return all
}

func (s *Scene) engines() []*enginesim.Engine { return slices.Concat(s.P, s.D) }

func (s *Scene) close() {
	if s.gateway != nil {
		s.gateway.Stop()
	}
	s.client.CloseIdleConnections()
	if s.alone != nil {
		_ = s.alone.Close()
	}
	for _, e := range s.engines() {
		_ = e.Close()
	}
}

// renew makes the scene ready for a case: nothing runs, no fault waits, the gateway serves.
func (s *Scene) renew(ctx context.Context) error {
	for _, e := range s.engines() {
		e.ClearFaults()
		e.UnloadAdapter(adapter)
		if e.Dead() {
			if err := e.Restart(); err != nil {
				return err
			}
		}
	}
	if err := s.serves(ctx); err != nil {
		return err
	}
	if err := s.idle(ctx, startTime); err != nil {
		return errors.New("engines still work for an earlier case")
	}
	s.mark()
	return nil
}

// mark lets ledger, legs and tokens forget what was before.
func (s *Scene) mark() {
	s.requests, s.tokens = map[*enginesim.Engine]int{}, map[*enginesim.Engine]int64{}
	s.faults = map[string]bool{}
	for _, e := range s.engines() {
		s.requests[e], s.tokens[e] = len(e.Requests()), e.Stats().GenerationTokens
	}
	for _, f := range s.breaches() {
		s.faults[f.Error()] = true
	}
}

// serves waits until the gateway has answered the health path and then four requests in a row.
func (s *Scene) serves(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	last := "no answer"
	for good := 0; good < 4; {
		ok := false
		if s.ready != "" && good == 0 {
			ok, last = s.answers(ctx, http.MethodGet, s.ready, "")
		}
		if s.ready == "" || good > 0 || ok {
			ok, last = s.answers(ctx, http.MethodPost, completions, body("max_tokens", 2))
		}
		if ok {
			good++
			continue
		}
		good = 0
		select {
		case <-ctx.Done():
			return fmt.Errorf("the gateway is not ready: %s\n%s", last, s.gateway.Log())
		case <-s.gateway.Exited:
			return fmt.Errorf("the gateway has ended\n%s", s.gateway.Log())
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

func (s *Scene) answers(ctx context.Context, method, path, content string) (ok bool, what string) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, s.gateway.URL+path, strings.NewReader(content))
	if err != nil {
		return false, err.Error()
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(r)
	if err != nil {
		return false, err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return false, fmt.Sprintf("%s answers with status %d: %.300s", path, resp.StatusCode, text)
	}
	return true, ""
}

// idle waits until no engine serves a request.
func (s *Scene) idle(ctx context.Context, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for _, e := range s.engines() {
		if err := e.WaitIdle(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *Scene) breaches() (all []*enginesim.KVFault) {
	for _, e := range s.engines() {
		joined, ok := e.CheckKV().(interface{ Unwrap() []error })
		if !ok {
			continue
		}
		for _, err := range joined.Unwrap() {
			if f, ok := errors.AsType[*enginesim.KVFault](err); ok {
				all = append(all, f)
			}
		}
	}
	return all
}

// ledger waits until the engines are idle and returns what went wrong with KV since the case began, by kind; "" for
// nothing. A released handoff takes a moment to reach the prefill engine.
func (s *Scene) ledger(ctx context.Context) string {
	if s.idle(ctx, 5*time.Second) != nil {
		return "engines still busy after 5 s"
	}
	found := ""
	for until := time.Now().Add(soon); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		count := map[enginesim.KVFaultKind]int{}
		for _, f := range s.breaches() {
			if !s.faults[f.Error()] {
				count[f.Kind]++
			}
		}
		var texts []string
		for kind, what := range map[enginesim.KVFaultKind]string{
			enginesim.KVLeak:        "handoffs that nobody read",
			enginesim.KVDoubleUse:   "handoffs used twice",
			enginesim.KVStaleRead:   "reads of released KV",
			enginesim.KVForeignRead: "reads of another prompt's KV",
			enginesim.KVNoTransfer:  "prompts computed again by decode",
		} {
			if count[kind] > 0 {
				texts = append(texts, strconv.Itoa(count[kind])+" "+what)
			}
		}
		slices.Sort(texts)
		if found = strings.Join(texts, ", "); found == "" {
			break
		}
	}
	return found
}

// clean is a breach if the ledger has faults.
func (s *Scene) clean(ctx context.Context) error {
	if found := s.ledger(ctx); found != "" {
		return breach("each handoff to be used exactly once, and no prompt to be computed twice", "%s", found)
	}
	return nil
}

// everywhere injects a fault for all requests of these engines.
func everywhere(engines []*enginesim.Engine, f enginesim.Fault) {
	f.Count = -1
	for _, e := range engines {
		e.Inject(f)
	}
}

// made is how many tokens an engine has generated since the case began.
func (s *Scene) made(engines []*enginesim.Engine) (n int64) {
	for _, e := range engines {
		n += e.Stats().GenerationTokens - s.tokens[e]
	}
	return n
}

// prompt returns a prompt that no engine has seen, of about that many bytes.
func prompt(size int) string {
	var b strings.Builder
	for b.Len() < size {
		fmt.Fprintf(&b, "%016x ", rand.Uint64()) //nolint:gosec // no secret
	}
	return b.String()[:size]
}
