// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// MaxAllocations is how many allocations a connector may add to a leg of a chat of 2 KB, over the connector http.
const MaxAllocations = 10

// Chat2KB is the body of the chat that legs are measured with.
func Chat2KB() string {
	return `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 390) +
		`"}],"max_tokens":64,"temperature":0,"stream":true}`
}

// Blocks2KB are the ids of the 32 blocks that its KV takes, as vLLM writes one group of them: [1000,1001,…].
func Blocks2KB() string {
	ids := make([]string, 32)
	for i := range ids {
		ids[i] = strconv.Itoa(1000 + i)
	}
	return "[" + strings.Join(ids, ",") + "]"
}

// Measured is a connector, as it is set up, whose legs are measured. What they cost is all that the flow asks of the
// connector for a leg but waiting: the description, the media items before it, the look at P's response after it. Side
// calls and events are not in it.
type Measured struct {
	Name      string // of this setup, for the results; "" is the connector's
	Connector connector.KVConnector
	Session   *connector.Session // with the Prepared and the Event that the flow would have set
	Response  Response           // P's. It is parsed once, outside of what is measured
}

// measuredLeg is one leg as the connector describes it, beside the plain one that the connector http would send.
type measuredLeg struct {
	name             string
	described, plain func() error
	allocs, base     float64 // of both, per run, once counted
}

func (m *Measured) legs(ctx context.Context) []*measuredLeg {
	c, s := m.Connector, m.Session
	if m.Name == "" {
		m.Name = c.Traits().Name
	}
	order, at := c.Traits().Order, c.Traits().Handoff
	response := m.Response.fill(at, s.API)
	p := response.result()
	checker, _ := connector.As[connector.PrefillChecker](c)
	encoder, _ := connector.As[connector.Encoder](c)
	finisher, _ := connector.As[connector.Finisher](c)

	var body jsonedit.Segments
	traits := c.Traits()
	leg := func(begin func() *connector.Leg, edit func(*connector.Leg) error) func() error {
		return func() error {
			leg := begin()
			if err := edit(leg); err != nil {
				return err
			}
			body.Reset()
			return leg.Splice(&body)
		}
	}
	normalized := func() *connector.Leg { return connector.NewPrefillLeg(s.Request, connector.Traits{}) }
	first := func() *connector.Leg { return connector.NewPrefillLeg(s.Request, traits) }
	second := func() *connector.Leg { return connector.NewLeg(s.Request) }
	prefill := leg(first, func(l *connector.Leg) error {
		if encoder != nil {
			_ = encoder.Items(s)
		}
		return c.Prefill(ctx, s, l)
	})
	if describe := prefill; checker != nil {
		prefill = func() error {
			if err := describe(); err != nil {
				return err
			}
			return checker.CheckPrefill(s, p)
		}
	}
	early := leg(second, func(l *connector.Leg) error { return c.Decode(ctx, s, nil, l) })
	decode := early // sent before P has answered, by some orders
	if order == connector.PrefillThenDecode || order == connector.DecodeFirst {
		decode = leg(second, func(l *connector.Leg) error {
			if finisher != nil {
				if _, final := finisher.Final(s, p); final {
					return errors.New("the response is final, so that there is no decode leg")
				}
			}
			return c.Decode(ctx, s, p, l)
		})
	}
	list := []*measuredLeg{
		{name: "prefill", described: prefill, plain: leg(normalized, asItIs)},
		{name: "decode", described: decode, plain: leg(second, asItIs)},
	}
	if order == connector.DecodeFirst {
		list = append(list, &measuredLeg{name: "first-try", described: early, plain: leg(second, asItIs)})
	}
	return list
}

// asItIs is what the connector http does.
func asItIs(*connector.Leg) error { return nil }

// count runs both and counts their allocations.
func (l *measuredLeg) count() error {
	if err := l.described(); err != nil {
		return err
	}
	const runs = 100
	l.base = testing.AllocsPerRun(runs, func() { _ = l.plain() })
	l.allocs = testing.AllocsPerRun(runs, func() { _ = l.described() })
	return nil
}

// BenchmarkLegs measures each leg of each setup, and in the same run the plain leg that the connector http would send
// instead. It reports what the connector adds to it: ns-over-plain/op, the median of many short runs that lay next to
// each other, so that what else the machine does spoils few of them; and allocs-over-plain/op. The budget is 5 µs and
// [MaxAllocations] a leg.
func BenchmarkLegs(b *testing.B, setups ...Measured) {
	b.Helper()
	for _, m := range setups {
		for _, l := range m.legs(b.Context()) {
			b.Run(m.Name+"/"+l.name, func(b *testing.B) {
				if err := l.count(); err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				over := l.measure(b)
				b.ReportMetric(over, "ns-over-plain/op")
				b.ReportMetric(l.allocs-l.base, "allocs-over-plain/op")
			})
		}
	}
}

// chunk is how many legs follow each other: some milliseconds, a collection of their garbage included.
const chunk = 2000

// measure runs the leg b.N times, in turns with the plain one, and returns by how many nanoseconds it is slower.
func (l *measuredLeg) measure(b *testing.B) float64 {
	b.Helper()
	over := make([]float64, 0, b.N/chunk+1)
	b.ResetTimer()
	b.StopTimer()
	for left := b.N; left > 0; left -= chunk {
		n := min(left, chunk)
		start := time.Now()
		for range n {
			_ = l.plain()
		}
		plain, before := time.Since(start), b.Elapsed()
		b.StartTimer()
		for range n {
			_ = l.described()
		}
		b.StopTimer()
		over = append(over, float64(b.Elapsed()-before-plain)/float64(n))
	}
	slices.Sort(over)
	return over[len(over)/2]
}

// LegBudget fails t if a leg of a setup costs more than [MaxAllocations] over the plain one. It must not run in
// parallel with other tests. Under the race detector, where pools drop what they are given at random, it only runs the
// legs. Time is the benchmark's: a test that held it would fail on a busy machine.
func LegBudget(t testing.TB, setups ...Measured) {
	t.Helper()
	for _, m := range setups {
		for _, l := range m.legs(t.Context()) {
			err := l.count()
			if over := l.allocs - l.base; err == nil && over > MaxAllocations && !raceDetector {
				err = fmt.Errorf("%g allocations, %g over the plain leg: the budget is %d", l.allocs, over,
					MaxAllocations)
			}
			if err != nil {
				t.Errorf("%s/%s: %v", m.Name, l.name, err)
			}
		}
	}
}
