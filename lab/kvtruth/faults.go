// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// fault is something that makes an index wrong.
type fault struct {
	name string
	// play does it, and returns when it began. It ends when the index may be exact again.
	play func(ctx context.Context, b *bench) (began time.Time, err error)
	// forever says that the index cannot get exact again: the engine has dropped what was missed.
	forever bool
}

var faults = []fault{
	{name: "nothing", play: func(context.Context, *bench) (time.Time, error) { return time.Now(), nil }},
	{name: "batches are lost, others follow", play: func(ctx context.Context, b *bench) (time.Time, error) {
		began := time.Now()
		err := b.loses(ctx, 3)
		return began, errors.Join(err, b.busy(ctx, 1))
	}},
	// A full queue loses what comes last, and then sends what it has.
	{name: "the last batches are lost, none follows", play: func(ctx context.Context, b *bench) (time.Time, error) {
		if err := b.busy(ctx, 1); err != nil {
			return time.Time{}, err
		}
		time.Sleep(settled)
		began := time.Now()
		err := b.loses(ctx, 1)
		time.Sleep(3 * time.Second)
		return began, err
	}},
	{name: "the gateway starts again", play: func(ctx context.Context, b *bench) (time.Time, error) {
		b.view.close()
		began := time.Now()
		return began, b.watch(ctx)
	}},
	{name: "the connection breaks, and cannot be made for 2 s",
		play: func(ctx context.Context, b *bench) (time.Time, error) {
			began := time.Now()
			b.both(func(r *relay) { r.shut = true })
			b.cut()
			err := b.busy(ctx, 3)
			time.Sleep(2 * time.Second)
			b.both(func(r *relay) { r.shut = false })
			return began, err
		}},
	{name: "the network is silent for 8 s", play: func(ctx context.Context, b *bench) (time.Time, error) {
		began := time.Now()
		b.both(func(r *relay) { r.held = true })
		err := b.busy(ctx, 3)
		time.Sleep(time.Until(began.Add(8 * time.Second)))
		b.both(func(r *relay) { r.held = false })
		return began, err
	}},
	{name: "more comes than a slow reader can take", play: tooMuch},
	{name: "the engine is killed, and starts again", play: func(_ context.Context, b *bench) (time.Time, error) {
		began := b.kill()
		return began, b.engine.Restart()
	}},
	{name: "the same, unseen, and it is further than before",
		play: func(ctx context.Context, b *bench) (time.Time, error) {
			before := b.events.next
			b.both(func(r *relay) { r.held = true })
			began := b.kill()
			if err := b.engine.Restart(); err != nil {
				return began, err
			}
			err := b.busy(ctx, int(before)) // each request is a batch or more
			b.both(func(r *relay) { r.held = false })
			return began, err
		}},
	{name: "the gateway starts again, and the replay buffer is too small", forever: true,
		play: func(ctx context.Context, b *bench) (time.Time, error) {
			if err := b.busy(ctx, b.steps+1); err != nil {
				return time.Time{}, err
			}
			b.view.close()
			began := time.Now()
			return began, b.watch(ctx)
		}},
}

// tooMuch stops reading until the engine has dropped batches.
func tooMuch(ctx context.Context, b *bench) (time.Time, error) {
	began := time.Now()
	b.events.set(func() { b.events.held = true })
	err := b.busy(ctx, b.many)
	b.events.set(func() { b.events.held = false })
	time.Sleep(time.Second)
	return began, err
}

// bench is one engine, what is between it and its reader, and the reader's view.
type bench struct {
	*run
	block          int // tokens
	steps          int // batches that the engine keeps for a replay
	many           int // requests whose batches are more than the sockets between engine and reader hold
	engine         engine
	events, replay *relay
	view           *view
	prompts        *prompts
}

// row is what a fault has shown.
type row struct {
	fault
	claimed     time.Duration // how long the index claimed to be exact and was not
	stopped     bool          // it stopped claiming it
	stoppedAt   time.Duration // after the fault began
	exactAgain  time.Duration // after the fault ended
	lost, holes int           // batches on the way, and by the engine
	result      result
}

// connect puts a network between the engine and its reader.
func (b *bench) connect() error {
	b.prompts = b.run.prompts()
	events, replay := b.engine.KVEvents()
	var err error
	if b.events, err = newRelay(events); err != nil {
		return err
	}
	b.events.small = true
	b.replay, err = newRelay(replay)
	return err
}

func (b *bench) close() {
	b.view.close()
	b.events.close()
	b.replay.close()
}

// watch begins a view, as a gateway that starts.
func (b *bench) watch(ctx context.Context) error {
	e, err := discovery.New(b.engine.URL(), discovery.RoleBoth)
	if err != nil {
		return err
	}
	e.Attributes = map[string]string{"kvEvents": "tcp://" + b.events.address(),
		"kvEventsReplay": "tcp://" + b.replay.address()}
	b.view, err = watch(ctx, e, b.model)
	return err
}

func (b *bench) both(change func(*relay)) {
	for _, r := range []*relay{b.events, b.replay} {
		r.set(func() { change(r) })
	}
}

func (b *bench) cut() {
	b.events.cut()
	b.replay.cut()
}

// kill kills the engine, which then holds nothing of the last prompt.
func (b *bench) kill() time.Time {
	began := time.Now()
	b.engine.Kill()
	b.view.knows(b.view.truth, 0)
	return began
}

// loses drops what the engine sends while it serves some requests.
func (b *bench) loses(ctx context.Context, requests int) error {
	b.events.set(func() { b.events.lose = true })
	err := b.busy(ctx, requests)
	time.Sleep(settled)
	b.events.set(func() { b.events.lose = false })
	return err
}

// busy lets the engine serve some prompts that nobody has seen, and notes that it holds the last of them.
func (b *bench) busy(ctx context.Context, n int) error {
	for range n {
		body, ids, err := b.view.request(ctx, b.prompts.fresh("", 900), 1)
		if err != nil {
			return err
		}
		if _, _, err := ask(ctx, b.engine.URL(), body); err != nil {
			return err
		}
		b.view.knows(ids, (len(ids)-1)/b.block*b.block)
	}
	return nil
}

// play plays a fault.
func (b *bench) play(ctx context.Context, f fault) (*row, error) {
	out := &row{fault: f}
	if err := b.busy(ctx, 5); err != nil {
		return nil, err
	}
	time.Sleep(settled)
	b.view.lied()
	b.events.set(func() { b.events.lost, b.events.holes = 0, 0 })
	began, err := f.play(ctx, b)
	if err != nil {
		return nil, err
	}
	ended := time.Now()
	if at, ok := b.view.changed(false, began); ok {
		out.stopped, out.stoppedAt = true, at.Sub(began)
	}
	if !f.forever {
		at, err := b.view.becomes(ctx, true, ended, 2*time.Minute)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
		out.exactAgain = at.Sub(ended)
	}
	time.Sleep(settled)
	out.claimed = b.view.lied()
	b.events.set(func() { out.lost, out.holes = b.events.lost, b.events.holes })
	for range b.requests {
		if err := b.view.compare(ctx, b.prompts.next(), &out.result); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// judge is an error where the index claimed what it does not know.
func (r *row) judge() error {
	const soon = time.Second
	switch {
	case r.claimed > soon:
		return fmt.Errorf("%s: for %s the index claimed to be exact and was not", r.name, r.claimed)
	case r.stopped && r.stoppedAt > soon:
		return fmt.Errorf("%s: the index stopped claiming to be exact after %s", r.name, r.stoppedAt)
	case r.forever && r.result.Exact == 0:
		return nil
	}
	if err := r.result.judge(); err != nil {
		return fmt.Errorf("%s: %w: %s", r.name, err, r.result)
	}
	return nil
}

// table prints rows as Markdown.
func table(rows []*row) string {
	var b strings.Builder
	b.WriteString("| fault | batches lost | claimed to be exact and was not | stopped claiming it after " +
		"| exact again after | requests while exact | predicted right |\n|---|---|---|---|---|---|---|\n")
	for _, r := range rows {
		stopped, again := "not seen", ms(r.exactAgain)
		if r.stopped {
			stopped = ms(r.stoppedAt)
		}
		if r.forever {
			again = "never"
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %s | %d of %d | %d |\n", r.name, r.lost+r.holes, ms(r.claimed), stopped,
			again, r.result.Exact, r.result.Requests, r.result.Right)
	}
	return b.String()
}

func ms(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }

// all plays faults, one after the other, with one engine.
func (b *bench) all(ctx context.Context, faults []fault) (rows []*row, err error) {
	if err := b.watch(ctx); err != nil {
		return nil, err
	}
	defer b.close()
	if _, err := b.view.becomes(ctx, true, time.Now(), time.Minute); err != nil {
		return nil, err
	}
	for _, f := range faults {
		r, err := b.play(ctx, f)
		if err != nil {
			return rows, err
		}
		fmt.Fprintln(os.Stderr, f.name, r.result)
		rows = append(rows, r)
	}
	return rows, nil
}

func realFaults(ctx context.Context, r *run, only string) error {
	dir, err := os.MkdirTemp("", "kvtruth")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := &bench{run: r, block: vllmBlock, steps: 1000, many: 700}
	if b.engine, err = startVLLM(dir, 4<<10, b.steps); err != nil {
		return err
	}
	defer b.engine.Close()
	if err := b.connect(); err != nil {
		return err
	}
	var chosen []fault
	for _, f := range faults {
		if strings.Contains(f.name, only) {
			chosen = append(chosen, f)
		}
	}
	rows, err := b.all(ctx, chosen)
	fmt.Print(table(rows))
	for _, row := range rows {
		err = errors.Join(err, row.judge())
	}
	return err
}
