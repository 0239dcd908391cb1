// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// Options are the settings of a [Prober]. Flow and Endpoints are required.
type Options struct {
	Flow      *pdflow.Flow                // carries the probes, to pairs that the prober chooses
	Endpoints func() []discovery.Endpoint // the engines known now; those that are ready are probed
	Model     string                      // the model to ask for; "": none
	Header    func() http.Header          // of each request, for engines that want an Authorization; nil: none

	// Alone are engines outside the fleet that a probe is compared with. Without them the prober asks engines of the
	// fleet that are not of the pair; the prefill engine where KV goes through a store; and a second pair where no
	// engine can serve alone.
	Alone []discovery.Endpoint

	Every      time.Duration // between two probes' beginnings, with a jitter of a tenth; default 1 s
	Timeout    time.Duration // of one request; default 30 s
	Characters int           // of a prompt; default 512, some 200 tokens of random text
	MaxTokens  int           // of a response; default 8
	// Logprobs is how many logprobs a probe asks for; default 5. Below 0: none, and texts alone are compared.
	Logprobs int
	// Tolerance is how far two logprobs may be apart that count as equal, in nats; default 0.3.
	Tolerance float64

	Estimator  EstimatorOptions
	Quarantine *Quarantine // keeps requests away from what is named; nil: it is only told
	// Previous is a prober of the same engines whose Run has returned. The new one goes on from its results, with what
	// it has named, and the previous one must not be used any more. Estimator is then not read. Nil: there is none.
	Previous *Prober

	Hold      func() bool                    // no probe while it returns true (an overload, a drain); nil: never
	OnResult  func(Result, error)            // called after each probe; nil allowed
	OnFinding func(f Finding, released bool) // called when something is named, and when it is released; nil allowed
	Meter     metric.MeterProvider           // nil: no metrics
}

// Prober sends synthetic probes beside live traffic, and finds the engine or pair that corrupts KV. Its metrics are
// pd.attest.probes (by pd.verdict: right, wrong, inconclusive, or failed where an engine gave no response) and
// pd.attest.named (1 for each engine or pair that is named now, by pd.prefill and pd.decode).
type Prober struct {
	o            Options
	estimator    *Estimator
	store        bool
	turn         int // which reference is next
	fleet        map[string]discovery.Endpoint
	known        []discovery.Endpoint // the list that fleet was made of
	probes       metric.Int64Counter
	registration metric.Registration

	mu       sync.Mutex
	findings []Finding
}

// New returns a prober. [Prober.Run] starts it.
func New(o Options) (*Prober, error) {
	if o.Flow == nil || o.Endpoints == nil {
		return nil, errors.New("attest: a Prober needs a Flow and Endpoints")
	}
	o.Every = cmp.Or(max(o.Every, 0), time.Second)
	o.Timeout = cmp.Or(max(o.Timeout, 0), 30*time.Second)
	if o.Characters < 32 { // less would not be unique
		o.Characters = 512
	}
	o.MaxTokens = cmp.Or(max(o.MaxTokens, 0), 8)
	o.Logprobs = max(cmp.Or(o.Logprobs, 5), 0)
	o.Tolerance = cmp.Or(max(o.Tolerance, 0), 0.3)
	p := &Prober{o: o, store: o.Flow.Connector().Traits().Handoff.ContentStore}
	if o.Previous != nil {
		p.estimator, p.findings, p.o.Previous = o.Previous.estimator, o.Previous.findings, nil
		p.tell(nil, nil)
	} else {
		p.estimator = NewEstimator(o.Estimator)
	}
	return p, p.instrument()
}

func (p *Prober) instrument() error {
	if p.o.Meter == nil {
		p.o.Meter = noop.NewMeterProvider()
	}
	m := p.o.Meter.Meter("github.com/pdkit/pdkit/pdflow/attest")
	var errs [3]error
	p.probes, errs[0] = m.Int64Counter("pd.attest.probes", metric.WithUnit("{probe}"),
		metric.WithDescription("Synthetic probes whose response is compared with another engine's, by verdict"))
	named, err := m.Int64ObservableGauge("pd.attest.named", metric.WithUnit("{suspect}"),
		metric.WithDescription("Engines and pairs that corrupt KV"))
	errs[1] = err
	p.registration, errs[2] = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		for _, f := range p.Findings() {
			o.ObserveInt64(named, 1, metric.WithAttributes(append(p.labels(),
				attribute.String("pd.prefill", f.Prefill), attribute.String("pd.decode", f.Decode))...))
		}
		return nil
	}, named)
	return errors.Join(errs[:]...)
}

func (p *Prober) labels() []attribute.KeyValue {
	return []attribute.KeyValue{attribute.String("gen_ai.request.model", p.o.Model)}
}

// Findings returns what is named now. It is safe for concurrent use.
func (p *Prober) Findings() []Finding {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.findings)
}

// Suspects returns what may be at fault and is not named, the likeliest first: too few probes told, or the fleet is too
// small to tell a P, a D and their pair apart. Not while Run or Probe runs.
func (p *Prober) Suspects() []Suspect { return p.estimator.Suspects() }

// maxSlower bounds how much slower the probes get while engines do not answer them.
const maxSlower = 16

// Run sends probes until ctx ends, and then returns nil. The first comes after one period. While engines do not answer
// probes, they come at twice the period, then four times, up to 16 times: a fleet that is overloaded or fails is no
// place to look for wrong texts. What it has named stays in quarantine after Run, for a next prober (see
// [Options.Previous]); [Quarantine.Adopt] releases it.
func (p *Prober) Run(ctx context.Context) error {
	defer func() { _ = p.registration.Unregister() }()
	slower := 1.0
	for {
		every := time.Duration(slower * float64(p.o.Every))
		pause := every*9/10 + rand.N(every/5+1) //nolint:gosec // jitter, guards nothing
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		if p.o.Hold != nil && p.o.Hold() {
			continue
		}
		r, err := p.Probe(ctx)
		if ctx.Err() != nil {
			return nil
		}
		verdict := string(r.Verdict)
		if err != nil {
			slower, verdict = min(2*slower, maxSlower), "failed"
		} else {
			slower = 1
		}
		p.probes.Add(ctx, 1, metric.WithAttributes(append(p.labels(), attribute.String("pd.verdict", verdict))...))
		if p.o.OnResult != nil {
			p.o.OnResult(r, err)
		}
	}
}

// follow tells the estimator of engines that came or left.
func (p *Prober) follow() {
	now := slices.Clone(p.o.Endpoints())
	now = slices.DeleteFunc(now, func(e discovery.Endpoint) bool { return e.Phase != discovery.PhaseReady })
	slices.SortFunc(now, func(a, b discovery.Endpoint) int { return strings.Compare(a.ID, b.ID) })
	same := slices.EqualFunc(now, p.known, func(a, b discovery.Endpoint) bool {
		return a.ID == b.ID && a.Role == b.Role && a.Group == b.Group && a.URL.String() == b.URL.String()
	})
	if same && p.fleet != nil {
		return
	}
	var prefills, decodes []string
	p.known, p.fleet = now, map[string]discovery.Endpoint{}
	for _, e := range now {
		p.fleet[e.ID] = e
		if e.Role.Has(discovery.RolePrefill) {
			prefills = append(prefills, e.ID)
		}
		if e.Role.Has(discovery.RoleDecode) {
			decodes = append(decodes, e.ID)
		}
	}
	p.mu.Lock()
	p.estimator.SetFleet(prefills, decodes, p.fits)
	p.findings = p.estimator.Named()
	p.mu.Unlock()
	p.tell(nil, nil)
}

func (p *Prober) fits(prefill, decode string) bool {
	return check.Of(p.o.Flow.Connector()).CheckPair(p.fleet[prefill], p.fleet[decode]) == nil
}

// tell passes on what has changed.
func (p *Prober) tell(named, released []Finding) {
	if p.o.Quarantine != nil {
		p.o.Quarantine.set(p.findings)
	}
	if p.o.OnFinding == nil {
		return
	}
	for _, f := range named {
		p.o.OnFinding(f, false)
	}
	for _, f := range released {
		p.o.OnFinding(f, true)
	}
}

// references returns whom to compare a pair with: up to two requests, each for one engine alone or for a second pair.
func (p *Prober) references(pair pdflow.Pick) []pdflow.Pick {
	var others, own []pdflow.Pick
	for _, e := range p.o.Alone {
		others = append(others, pdflow.Pick{Decode: e})
	}
	if len(others) > 0 {
		return others
	}
	traits := p.o.Flow.Connector().Traits()
	if p.store {
		return []pdflow.Pick{{Decode: pair.Prefill}}
	}
	p.turn++
	for i := range p.known {
		e := p.known[(i+p.turn)%len(p.known)]
		alone := !traits.Serving.PairOnly && e.Role.Has(discovery.RoleDecode) || e.Role.Has(discovery.RoleBoth)
		if !alone || traits.Serving.PrefillPairOnly && e.Role != discovery.RoleDecode {
			continue
		}
		if e.ID == pair.Prefill.ID || e.ID == pair.Decode.ID {
			own = append(own, pdflow.Pick{Decode: e})
		} else {
			others = append(others, pdflow.Pick{Decode: e})
		}
	}
	refs := append(others, own...) // what an engine computes alone does not come from another, so D itself will do
	if len(refs) == 0 {
		refs = p.otherPairs(pair)
	}
	return refs[:min(2, len(refs))]
}

// otherPairs returns up to two pairs that share no engine with a pair, nor with each other, and of which nothing is
// named.
func (p *Prober) otherPairs(pair pdflow.Pick) []pdflow.Pick {
	var out []pdflow.Pick
	used := map[string]bool{pair.Prefill.ID: true, pair.Decode.ID: true}
	for i := range p.known {
		a := p.known[(i+p.turn)%len(p.known)]
		if used[a.ID] || !a.Role.Has(discovery.RolePrefill) {
			continue
		}
		for j := range p.known {
			b := p.known[(j+p.turn)%len(p.known)]
			s := Suspect{a.ID, b.ID}
			if !used[b.ID] && a.ID != b.ID && b.Role.Has(discovery.RoleDecode) && p.fits(a.ID, b.ID) &&
				!p.estimator.explained(s, nil) {
				used[a.ID], used[b.ID] = true, true
				out = append(out, pdflow.Pick{Prefill: a, Decode: b})
				break
			}
		}
		if len(out) == 2 {
			break
		}
	}
	return out
}
