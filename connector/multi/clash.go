// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"context"
	"errors"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

func isStore(c connector.KVConnector) bool {
	s, ok := connector.As[connector.ContentStore](c)
	return ok && s.ContentStore()
}

// orders are those that a child works in, its own first.
func orders(c connector.KVConnector) []connector.Order {
	all := []connector.Order{c.Order()}
	if f, ok := connector.As[connector.Flexible](c); ok {
		for _, o := range f.Orders() {
			if !slices.Contains(all, o) {
				all = append(all, o)
			}
		}
	}
	return all
}

// commonOrder finds an order that suits all children. Content stores are found by the prompt alone and suit any; the first other child's
// own order is the first choice.
func commonOrder(children []child) (connector.Order, error) {
	bound := slices.DeleteFunc(slices.Clone(children), func(c child) bool { return isStore(c.KVConnector) })
	if len(bound) == 0 {
		return children[0].Order(), nil
	}
	for _, o := range orders(bound[0].KVConnector) {
		if !slices.ContainsFunc(bound[1:], func(c child) bool { return !slices.Contains(orders(c.KVConnector), o) }) {
			return o, nil
		}
	}
	var each []string
	for i := range bound {
		var names []string
		for _, o := range orders(bound[i].KVConnector) {
			names = append(names, o.String())
		}
		each = append(each, bound[i].label()+" wants "+strings.Join(names, " or "))
	}
	return 0, &config.FieldError{Path: "connectors", Problem: "have no order of the legs in common: " + strings.Join(each, ", "),
		Remedy: "keep one of them; the other can be a second kvConnector by fallback: connector"}
}

// single are the abilities of which a request can have one.
var single = []struct {
	what string
	has  func(connector.KVConnector) bool
}{
	{"make a side call before the legs", has[connector.Preparer]},
	// A store's wait is for time to pass, and can be any child's besides.
	{"wait for a notice between the legs", func(c connector.KVConnector) bool { return !isStore(c) && has[connector.Expecter](c) }},
	{"end requests with P's answer", has[connector.Finisher]},
	{"rewrite D's answer", has[connector.Rewriter]},
	{"judge P's answer while D runs", has[connector.PrefillChecker]},
	{"ask D first and judge its answer", func(c connector.KVConnector) bool {
		return c.Order() == connector.DecodeFirst && has[connector.ColdDetector](c)
	}},
	{"add an encode stage", has[connector.Encoder]},
}

func has[T any](c connector.KVConnector) bool {
	_, ok := connector.As[T](c)
	return ok
}

func clash(a, b *child, problem, remedy string) error {
	return &config.FieldError{Path: b.at, Problem: problem + ", as " + a.label() + " does", Remedy: remedy}
}

const oneOfThem = "keep one of the two, with stores beside it"

// checkClashes finds the children that cannot share a request.
func checkClashes(children []child, order connector.Order) error {
	probes := make([]probe, len(children))
	for i := range children {
		probes[i] = probing(children[i].KVConnector, order)
	}
	var errs []error
	for j := range children {
		for i := range children[:j] {
			if err := checkPair(&children[i], &children[j], &probes[i], &probes[j]); err != nil {
				errs = append(errs, err)
				break
			}
		}
	}
	return errors.Join(errs...)
}

func checkPair(a, b *child, pa, pb *probe) error {
	switch {
	case pa.handoff && pb.handoff:
		return clash(a, b, "needs a handoff in P's answer", "an engine fails when two of its connectors answer with the same parameters; "+oneOfThem)
	case a.KVConnector.Name() == b.KVConnector.Name() && !isStore(a.KVConnector):
		return clash(a, b, "uses the parameters of "+b.KVConnector.Name(), oneOfThem)
	}
	for _, s := range single {
		if s.has(a.KVConnector) && s.has(b.KVConnector) {
			return clash(a, b, "has to "+s.what, oneOfThem)
		}
	}
	for _, legs := range [][2]map[string]string{{pa.prefill, pb.prefill}, {pa.decode, pb.decode}} {
		for key, value := range legs[0] {
			if other, both := legs[1][key]; both && other != value {
				return clash(a, b, "sets "+key+" to a value of its own", oneOfThem)
			}
		}
	}
	return nil
}

// describing puts those children last that make P end by length: what they set, the others' normalization would take away again.
func describing(children []child) []connector.KVConnector {
	var first, last []connector.KVConnector
	for i := range children {
		c := children[i].KVConnector
		if probing(c, c.Order()).byLength {
			last = append(last, c)
		} else {
			first = append(first, c)
		}
	}
	return append(first, last...)
}

// probe is what a child does to a request that does not exist.
type probe struct {
	handoff         bool              // it refuses an answer of P without one
	byLength        bool              // it sets min_tokens on the prefill leg
	prefill, decode map[string]string // parameters and headers that it sets
}

// probing asks a child to describe both legs. What it cannot describe without real engines stays unknown: a clash in that shows with the
// first request.
func probing(c connector.KVConnector, order connector.Order) (p probe) {
	defer func() {
		if recover() != nil {
			p = probe{} // it needs what only a flow gives it
		}
	}()
	req, err := connector.ParseRequest(connector.APIChat, []byte(`{"model":"m","messages":[]}`))
	if err != nil {
		return p
	}
	s := connector.NewSessionWith([16]byte{1}, req, "probe", stranger("p"), stranger("d"))
	ctx := context.Background()
	leg := connector.NewLeg(req)
	if c.Prefill(ctx, s, leg) == nil {
		p.prefill = settings(leg)
		_, p.byLength = leg.Current("min_tokens")
	}
	var answer *connector.PrefillResult
	if order == connector.PrefillThenDecode {
		answer = connector.NewPrefillResult(200, nil, []byte(`{"id":"x","choices":[{"finish_reason":"length"}]}`), time.Now())
	}
	leg = connector.NewLeg(req)
	switch err := c.Decode(ctx, s, answer, leg); {
	case err == nil:
		p.decode = settings(leg)
	case errors.Is(err, connector.ErrNoTransfer):
		p.handoff = true
	}
	return p
}

// stranger is an engine with an entry for every protocol.
func stranger(host string) discovery.Endpoint {
	return discovery.Endpoint{ID: host, URL: &url.URL{Scheme: "http", Host: host + ":8000"}, Attributes: map[string]string{
		"zmqAddress": host + ":1", "engineID": host, "sideChannelHost": host, "sideChannelPort": "1", "bootstrapPort": "1", "bootstrapHost": host,
		"receiverHost": host, "receiverInitPorts": "1", "receiverAllocPorts": "2", "notifyPort": "1", "handshakePort": "1", "p2pHost": host, "p2pPort": "1",
	}}
}

// settings are a leg's parameters and headers.
func settings(leg *connector.Leg) map[string]string {
	all := map[string]string{}
	for _, h := range leg.Header() {
		all["the header "+h.Name] = h.Value
	}
	if raw, ok := leg.Current(connector.ParamsMember); ok {
		if d, err := jsonedit.Parse(raw); err == nil {
			for i := range d.Len() {
				all[connector.ParamsMember+"."+d.Name(i)] = string(d.Value(i))
			}
		}
	}
	return all
}
