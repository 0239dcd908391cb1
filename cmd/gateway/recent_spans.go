// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"math/bits"
	"time"

	"github.com/pdkit/pdkit/pdflow"
)

// The last minute is counted in slots, and the last hour in minutes. The newest of each is not full yet.
const (
	slotLength  = 5 * time.Second
	minuteSlots = int64(time.Minute / slotLength)
	hourMinutes = 60
)

// windows counts what a model's requests came to in the last minute and in the last hour, and what each of its engines
// did. Who holds recent's mutex may call it.
type windows struct {
	model   string
	log     *slog.Logger
	begin   time.Time // of the first slot
	slot    int64     // the newest: Unix time in slotLengths
	slots   [minuteSlots]modelCount
	minutes [hourMinutes]modelCount // what has left the newest slot
	engines map[string]*engineWindow
	kv      liveKV // the engines' counts when they were last read
	kvKnown bool
	leases  map[string]float64 // of prefill engines, that have ended without a read, when they were last read
}

// modelCount is what a model did in a time.
type modelCount struct {
	Served   int64   `json:"served"`   // requests
	Failed   int64   `json:"failed"`   // requests: their clients got an error or a cut stream, and have not left before
	Refused  int64   `json:"refused"`  // of Failed: by a limit, before anything was sent
	Left     int64   `json:"left"`     // requests: their clients left before the end
	Attempts int64   `json:"attempts"` // at pairs
	Broken   int64   `json:"broken"`   // of Attempts: those that failed
	Mended   int64   `json:"mended"`   // of Broken: another attempt has served their request
	Output   int64   `json:"output"`   // tokens
	Reused   int64   `json:"reused"`   // prompt tokens that decode did not compute, where its response tells
	Taken    float64 `json:"taken"`    // the same, as engines count
	Bytes    float64 `json:"bytes"`    // of KV that moved, as engines count
	first    histogram
}

func (c *modelCount) add(o *modelCount) {
	c.Served, c.Failed, c.Refused = c.Served+o.Served, c.Failed+o.Failed, c.Refused+o.Refused
	c.Left += o.Left
	c.Attempts, c.Broken, c.Mended = c.Attempts+o.Attempts, c.Broken+o.Broken, c.Mended+o.Mended
	c.Output, c.Reused = c.Output+o.Output, c.Reused+o.Reused
	c.Taken, c.Bytes = c.Taken+o.Taken, c.Bytes+o.Bytes
	c.first.add(&o.first)
}

// advance makes the slot of now the newest, and returns it. A time before the newest slot belongs to that.
func (w *windows) advance(now time.Time) *modelCount {
	slot := now.Unix() / int64(slotLength/time.Second)
	if w.begin.IsZero() {
		w.begin, w.slot = now, slot
	}
	if w.slot < slot {
		w.turn(slot)
	}
	return &w.slots[w.slot%minuteSlots]
}

// turn ends the slots before one. Those that are an hour back are empty anyway.
func (w *windows) turn(slot int64) {
	for w.slot = max(w.slot, slot-minuteSlots*(hourMinutes+1)); w.slot < slot; {
		minute := w.slot / minuteSlots % hourMinutes
		w.minutes[minute].add(&w.slots[w.slot%minuteSlots])
		for _, e := range w.engines {
			e.ends(w.slot%minuteSlots, minute)
		}
		w.slot++
		w.slots[w.slot%minuteSlots] = modelCount{}
		next := w.slot / minuteSlots % hourMinutes
		if next != minute {
			w.minutes[next] = modelCount{}
		}
		for _, e := range w.engines {
			e.begins(w.slot%minuteSlots, next, next != minute)
		}
	}
	w.mark(time.Unix(slot*int64(slotLength/time.Second), 0).UTC())
}

// attempt counts one that has ended.
func (w *windows) attempt(o *pdflow.Outcome, now time.Time) {
	c := w.advance(now)
	c.Attempts++
	switch {
	case o.Err == nil:
		c.Output, c.Reused = c.Output+o.Usage.Output, c.Reused+o.Usage.Reused
	case breaks(o.Err.Code):
		c.Broken++
	}
	w.engineAttempt(o, now)
}

// breaks reports whether an attempt that ends so has failed. One has not whose client has left, or that was not needed
// any more.
func breaks(code pdflow.Code) bool {
	return code != "" && code != pdflow.CodeClientGone && code != pdflow.CodeCanceled
}

// readKV is told what the model's engines have counted since the gateway began to ask them.
func (w *windows) readKV(kv liveKV, now time.Time) {
	c := w.advance(now)
	if w.kvKnown {
		c.Taken, c.Bytes = c.Taken+max(0, kv.Taken-w.kv.Taken), c.Bytes+max(0, kv.Bytes-w.kv.Bytes)
	}
	w.kv, w.kvKnown = kv, true
}

// liveSpan is what a model did in the last minute, or hour, of which so many seconds are counted.
type liveSpan struct {
	modelCount
	Seconds float64      `json:"seconds"`
	First   *percentiles `json:"first,omitempty"` // time to the first token of streams, as their clients wait for it
}

// livePast has a value for each minute of the last hour, the oldest first, as long as the model is served.
type livePast struct {
	Served []int64   `json:"served"`
	Failed []int64   `json:"failed"`
	First  []float64 `json:"first"` // the 99th percentile of the time to the first token, ms; -1: no stream
	Output []int64   `json:"output"`
	Taken  []int64   `json:"taken"` // tokens, by responses or else by engines
	Bytes  []float64 `json:"bytes"`
}

// spans returns the last minute, the last hour, and what is shown of each minute.
func (w *windows) spans(now time.Time) (minute, hour liveSpan, past livePast) {
	newest := w.advance(now)
	age := now.Sub(w.begin).Seconds()
	part := now.Sub(time.Unix(w.slot*int64(slotLength/time.Second), 0)).Seconds() // of the newest slot
	for i := range w.slots {
		minute.add(&w.slots[i])
	}
	minute.Seconds = max(1, min(age, (time.Minute-slotLength).Seconds()+part))
	current := w.slot / minuteSlots
	for m := max(current-hourMinutes+1, w.begin.Unix()/60); m <= current; m++ {
		c := w.minutes[m%hourMinutes]
		if m == current {
			c.add(newest)
		}
		hour.add(&c)
		first := -1.
		if q := c.first.percentiles(); q != nil {
			first = q.P99
		}
		taken := c.Reused
		if taken == 0 {
			taken = int64(c.Taken)
		}
		past.Served, past.Failed = append(past.Served, c.Served), append(past.Failed, c.Failed)
		past.First, past.Output = append(past.First, first), append(past.Output, c.Output)
		past.Taken, past.Bytes = append(past.Taken, taken), append(past.Bytes, c.Bytes)
	}
	hour.Seconds = max(1, min(age, float64((hourMinutes-1)*60)+float64(w.slot%minuteSlots)*slotLength.Seconds()+part))
	minute.First, hour.First = minute.first.percentiles(), hour.first.percentiles()
	return minute, hour, past
}

// histogram counts times in buckets whose ends grow by a quarter of a power of two. The first one has what is below
// 64 µs, the last one what is above 15 minutes.
type histogram [96]uint32

const histogramShift = 6 // 64 µs

func (h *histogram) observe(d time.Duration) { h[bucketOf(d)]++ }

func bucketOf(d time.Duration) int {
	us := uint64(max(d, 0)/time.Microsecond) >> (histogramShift - 2)
	if us < 4 {
		return 0
	}
	power := bits.Len64(us) - 1 // 2 and more
	return min(4*(power-2)+int(us>>(power-2)&3)+1, len(histogram{})-1)
}

// bucketEnd is the end of a bucket in ms.
func bucketEnd(i int) float64 {
	return float64(uint64(4+i%4)<<(i/4)) * (1 << (histogramShift - 2)) / 1000
}

func (h *histogram) add(o *histogram) {
	for i := range h {
		h[i] += o[i]
	}
}

func (h *histogram) count() (n uint32) {
	for _, c := range h {
		n += c
	}
	return n
}

// over counts the times in the buckets that are above a limit in ms.
func (h *histogram) over(limit float64) (n uint32) {
	for i := len(h) - 1; i > 0 && bucketEnd(i-1) >= limit; i-- {
		n += h[i]
	}
	return n
}

// quantile returns the time in ms that a share q of those counted is below.
func (h *histogram) quantile(q float64) float64 {
	rank, begin := q*float64(h.count()), 0.
	for i, c := range h {
		end := bucketEnd(i)
		if rank <= float64(c) && c > 0 {
			return begin + (end-begin)*rank/float64(c)
		}
		rank, begin = rank-float64(c), end
	}
	return begin
}

// percentiles are of times in ms.
type percentiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// percentiles returns nil if no time was counted.
func (h *histogram) percentiles() *percentiles {
	if h.count() == 0 {
		return nil
	}
	return &percentiles{milli(h.quantile(.5)), milli(h.quantile(.99))}
}

// milli rounds to three digits after the point.
func milli(v float64) float64 { return float64(int64(v*1000+.5)) / 1000 }
