// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"sync"
	"time"
)

// TensorRT-LLM's server keeps its events until somebody takes them (POST /kv_cache_events, tensorrt_llm/serve/
// openai_server.py). What is taken is gone for all others, and there is no replay: events that are missing stay so
// until the engine starts again.

// maxDrain bounds what one poll takes, in bytes; maxMessage bounds each event. An engine that nobody has read holds all
// events since its start, up to its event_buffer_max_size; a block of 32 tokens takes about 2 kB.
const maxDrain = 1 << 30

const (
	errTaken = plainError("events are missing: another gateway has taken them, or this one before it started, or the " +
		"engine's event_buffer_max_size is too small; let one gateway alone read them, and start the engine again")
	errNoPoll = plainError("kvEvents must be one http://HOST:PORT/kv_cache_events, without kvEventsReplay " +
		"and loadEvents")
	errNoClient = plainError("there is no client that could ask for them")
	errTooMuch  = plainError("the response is too large")
)

// poller takes the events of an engine.
type poller struct {
	en  *engine
	url string

	mu    sync.Mutex // of what a doubt touches, too
	ranks map[int]*polled
}

// polled is where a rank stands.
type polled struct {
	src     Source
	next    uint64
	last    []byte // the event before next
	doubted bool   // the sink was told that events may be missing
	broken  bool   // and the next response may be another process's, as polls failed or paused
}

// run polls until ctx ends.
func (p *poller) run(ctx context.Context) {
	s := p.en.s
	pause, told := s.t.firstBackoff, false
	var answered time.Time
	for ctx.Err() == nil {
		began := time.Now()
		if told && began.Sub(answered) > 2*s.t.idle { // this process has paused
			p.doubt(true)
		}
		switch err := p.poll(ctx); {
		case ctx.Err() != nil:
		case err != nil:
			p.doubt(true)
			if told {
				s.n.lost.Add(1)
				s.n.streams.Add(-1)
			}
			told = false
			s.observe(p.en.source(0), "read", err)
			_ = wait(ctx, jitter(pause))
			pause = min(2*pause, s.t.lastBackoff)
		default:
			if !told {
				told, pause = true, s.t.firstBackoff
				s.n.streams.Add(1)
				s.observe(p.en.source(0), "", nil)
			}
			answered = time.Now()
			_ = wait(ctx, s.t.poll-time.Since(began))
		}
	}
	if told {
		s.n.streams.Add(-1)
	}
	p.doubt(true)
}

// poll takes what the engine has. An engine that is silent is doubted, and waited for: who breaks off loses events.
func (p *poller) poll(ctx context.Context) error {
	s := p.en.s
	client := s.o.Poll
	if client == nil {
		client = s.o.Client
	}
	if client == nil {
		return errNoClient
	}
	ctx, cancel := context.WithTimeout(ctx, s.t.drain)
	defer cancel()
	u, err := url.Parse(p.url)
	if err != nil {
		return errNoAddress
	}
	slow := time.AfterFunc(s.t.idle, func() { p.doubt(false) })
	defer slow.Stop()
	resp, err := s.ask(ctx, client, http.MethodPost, u)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errBadStatus
	}
	if err := readList(io.LimitReader(resp.Body, maxDrain), maxMessage, p.apply); err != nil {
		return err
	}
	slow.Stop()
	p.vouch()
	return nil
}

// readList reads a JSON list and hands on each of its members, which have at most so many bytes.
func readList(r io.Reader, most int, member func([]byte)) error {
	body := &bounded{r: r, left: most}
	list := json.NewDecoder(body)
	if begin, err := list.Token(); err != nil || begin != json.Delim('[') {
		return orNonsense(err)
	}
	for list.More() {
		var m json.RawMessage
		if err := list.Decode(&m); err != nil {
			return orNonsense(err)
		}
		body.left = most
		member(m)
	}
	if _, err := list.Token(); err != nil {
		return orNonsense(err)
	}
	return nil
}

// orNonsense keeps the errors of a connection, and hides those of JSON, whose texts have a piece of the response.
func orNonsense(err error) error {
	switch err.(type) { //nolint:errorlint // none is wrapped
	case nil, *json.SyntaxError, *json.UnmarshalTypeError:
		return errNonsense
	}
	return err
}

// apply gives an event to the sink. Its event_id counts the events of its rank from the engine's start.
func (p *poller) apply(event []byte) {
	s := p.en.s
	var head struct {
		ID   *uint64 `json:"event_id"`
		Rank int     `json:"attention_dp_rank"`
	}
	if json.Unmarshal(event, &head) != nil || head.ID == nil || head.Rank < 0 || head.Rank >= maxRanks {
		s.n.malformed.Add(1)
		return
	}
	id := *head.ID
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.ranks[head.Rank]
	if r == nil {
		r = &polled{src: p.en.source(head.Rank)}
		p.ranks[head.Rank] = r
	}
	now := time.Now()
	switch {
	case r.last != nil && id < r.next: // another process
		s.sink.ReplayEnd(r.src, true, now) // it has nothing of what the sink knows
		r.doubted, r.broken = false, false
	case id > r.next:
		s.observe(r.src, "read", errTaken)
	case r.doubted: // no other process would go on with this number
		r.vouch(s, now)
	}
	s.n.batches.Add(1)
	s.n.bytes.Add(int64(len(event)))
	missing, err := s.sink.Apply(r.src, id, event, now)
	if err != nil {
		s.n.malformed.Add(1)
	}
	if missing { // for good
		s.sink.ReplayEnd(r.src, false, now)
		r.doubted, r.broken = false, false
	}
	r.next, r.last = id+1, append(r.last[:0], event...)
}

// vouch shows the sink that the engine is still the process that sent the last event, and that none is missing.
func (r *polled) vouch(s *Subscriber, now time.Time) {
	r.doubted, r.broken = false, false
	if _, _ = s.sink.ReplayFrom(r.src); s.sink.Replayed(r.src, r.next-1, r.last, now) != nil {
		s.n.malformed.Add(1)
	}
	s.sink.ReplayEnd(r.src, true, now)
}

// vouch ends doubts that came from a slow response alone.
func (p *poller) vouch() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.ranks {
		if r.doubted && !r.broken {
			r.vouch(p.en.s, time.Now())
		}
	}
}

// doubt tells the sink that events may be missing.
func (p *poller) doubt(broken bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.ranks {
		r.broken = r.broken || broken
		if !r.doubted {
			r.doubted = true
			p.en.s.sink.Lost(r.src, time.Now())
		}
	}
}

// bounded reads up to a bound that moves on.
type bounded struct {
	r    io.Reader
	left int
}

func (b *bounded) Read(to []byte) (int, error) {
	if b.left == 0 {
		return 0, errTooMuch
	}
	n, err := b.r.Read(to[:min(len(to), b.left)])
	b.left -= n
	return n, err
}

// pollAt reads the address of events that are to be taken. A wildcard stands for the engine's host.
func pollAt(text, host string) (string, bool) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Path == "" || u.User != nil {
		return "", false
	}
	at, ok := parseAddress("tcp://"+u.Host, host, 0)
	u.Host = at
	return u.String(), ok
}
