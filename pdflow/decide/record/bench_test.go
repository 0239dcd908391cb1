// SPDX-License-Identifier: Apache-2.0

package record_test

import (
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// gate is a file that is written while it is open.
type gate struct{ sync.Mutex }

func (g *gate) Write(b []byte) (int, error) {
	g.Lock()
	defer g.Unlock()
	return len(b), nil
}

func (g *gate) Close() error { return nil }

// count is how many decisions were written. None may be lost.
func count(b *testing.B, to *record.Recorder) int {
	written, lost := to.Counts()
	require.Zero(b, lost)
	return int(written)
}

// A pick among eight and eight engines, and its end, by turns without a recorder, with one that does not take the
// request, and with one that does. What recording costs a request is the difference of the medians: the recorder's own
// goroutine writes while the clock stands still.
func BenchmarkPick(b *testing.B) {
	r, err := connector.ParseRequest(connector.APIChat, []byte(`{"model":"m","stream":true,"messages":[`+
		`{"role":"system","content":"`+strings.Repeat("You help. ", 100)+`"},{"role":"user","content":"`+
		strings.Repeat("What is it? ", 600)+`"}]}`))
	require.NoError(b, err)
	in, session := &pdflow.PickInput{Request: r, Attempt: 1}, &connector.Session{Request: r}
	set := newSet(b, 8, 8)
	var file gate
	file.Lock()
	names, shares := [3]string{"off", "not-sampled", "sampled"}, [3]float64{0, 1e-18, 1}
	var pickers [3]pdflow.Picker
	var last *record.Recorder
	for i, share := range shares {
		o := decide.Options{Engine: h100, TokenBytes: 131_072, Link: 2.5e9, ErrorBound: -1}
		if share > 0 {
			last = record.New(record.Options{Header: record.Header{Share: share},
				Open: func() (io.WriteCloser, error) { return &file, nil }})
			defer last.Close()
			o.Recorder = last
		}
		inner := pick.New(set, pick.PrefixAffinity(), pick.WithCandidates(), pick.WithSeed(1))
		picker, err := decide.New(inner, decide.Predicted(decide.PredictedOptions{}), &o)
		require.NoError(b, err)
		defer picker.Close()
		pickers[i] = picker.Bind(nil, connector.Serving{})
	}
	defer file.Unlock()
	one := func(p pdflow.Picker) {
		x, err := p.Pick(context.Background(), in)
		if err != nil {
			b.Fatal(err)
		}
		if x.PrefillDone != nil {
			x.PrefillDone(&pdflow.LegOutcome{})
		}
		x.Done(&pdflow.Outcome{Session: session, Mode: pdflow.ModeDisaggregated})
	}
	var took [3][]float64
	for n := 1; b.Loop(); n++ {
		for i, p := range pickers {
			began := time.Now()
			one(p)
			took[i] = append(took[i], float64(time.Since(began)))
		}
		if n%900 == 0 {
			b.StopTimer()
			file.Unlock()
			for written := 0; written < n; written = count(b, last) {
				time.Sleep(time.Millisecond)
			}
			file.Lock()
			b.StartTimer()
		}
	}
	for i, name := range names {
		slices.Sort(took[i])
		b.ReportMetric(took[i][len(took[i])/2], "ns/"+name)
	}
}
