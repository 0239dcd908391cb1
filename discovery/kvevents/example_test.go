// SPDX-License-Identifier: Apache-2.0

package kvevents_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"strings"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kvevents"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
)

// counting is a sink that only counts batches. Package kvindex has the real one.
type counting struct {
	next    uint64
	batches chan uint64
}

func (c *counting) Apply(_ kvevents.Source, seq uint64, _ []byte, _ time.Time) (replay bool, err error) {
	if seq != c.next {
		return true, nil
	}
	c.next++
	c.batches <- seq
	return false, nil
}

func (c *counting) Replayed(_ kvevents.Source, seq uint64, _ []byte, _ time.Time) error {
	c.next = seq + 1
	c.batches <- seq
	return nil
}

func (c *counting) ReplayFrom(kvevents.Source) (from uint64, needed bool)   { return c.next, false }
func (c *counting) ReplayEnd(kvevents.Source, bool, time.Time) (again bool) { return false }
func (c *counting) Lost(kvevents.Source, time.Time)                         {}
func (c *counting) Gone(kvevents.Source, time.Time)                         {}
func (c *counting) Forget(string)                                           {}

// An engine publishes which blocks it holds, and a subscriber gives each batch to a sink: those before it came, and
// those that follow.
func Example() {
	engine, err := enginesim.Start(enginesim.Config{KVEvents: &enginesim.KVEvents{}})
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	resp, err := http.Post(engine.URL()+"/v1/completions", "application/json",
		strings.NewReader(`{"model":"tiny","max_tokens":1,"prompt":"`+strings.Repeat("a prompt ", 20)+`"}`))
	if err != nil {
		log.Fatal(err)
	}
	_ = resp.Body.Close()

	entry, err := discovery.New(engine.URL(), discovery.RoleBoth)
	if err != nil {
		log.Fatal(err)
	}
	set, err := static.NewSet(entry)
	if err != nil {
		log.Fatal(err)
	}
	sink := &counting{batches: make(chan uint64, 100)}
	subscriber, err := kvevents.New(sink, &kvevents.Options{Client: http.DefaultTransport})
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = subscriber.Run(ctx, set) }()
	fmt.Println("batch", <-sink.batches)
	stop()
	<-done
	// Output: batch 0
}
