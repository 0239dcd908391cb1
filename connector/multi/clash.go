// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"errors"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/config"
)

// orders are those that a child works in, its own first.
func (c *child) orders() []connector.Order {
	return append([]connector.Order{c.traits.Order}, c.traits.OtherOrders...)
}

// commonOrder finds an order that suits all children. Content stores are found by the prompt alone and suit any; the first other child's
// own order is the first choice.
func commonOrder(children []child) (connector.Order, error) {
	bound := slices.DeleteFunc(slices.Clone(children), func(c child) bool { return c.traits.ContentStore })
	if len(bound) == 0 {
		return children[0].traits.Order, nil
	}
	for _, o := range bound[0].orders() {
		if !slices.ContainsFunc(bound[1:], func(c child) bool { return !slices.Contains(c.orders(), o) }) {
			return o, nil
		}
	}
	var each []string
	for i := range bound {
		var names []string
		for _, o := range bound[i].orders() {
			if !slices.Contains(names, o.String()) {
				names = append(names, o.String())
			}
		}
		each = append(each, bound[i].label()+" wants "+strings.Join(names, " or "))
	}
	return 0, &config.FieldError{Path: "connectors", Problem: "have no order of the legs in common: " + strings.Join(each, ", "),
		Remedy: "keep one of them; the other can be a second kvConnector by fallback: connector"}
}

// single is what only one connector can do to a request.
var single = []struct {
	what string
	does func(*child) bool
}{
	{"make a side call before the legs", has[connector.Preparer]},
	// A store's wait is for time to pass, and can be any child's besides.
	{"wait for a notice between the legs", func(c *child) bool { return !c.traits.ContentStore && has[connector.Expecter](c) }},
	{"end requests with P's answer", has[connector.Finisher]},
	{"rewrite D's answer", has[connector.Rewriter]},
	{"judge P's answer while D runs", has[connector.PrefillChecker]},
	{"ask D first and judge its answer", func(c *child) bool {
		return c.traits.Order == connector.DecodeFirst && has[connector.ColdDetector](c)
	}},
	{"add an encode stage", has[connector.Encoder]},
	{"give the legs an X-Request-Id of its own", func(c *child) bool { return c.traits.OwnRequestID }},
}

func has[T any](c *child) bool {
	_, ok := connector.As[T](c.KVConnector)
	return ok
}

func clash(a, b *child, problem, remedy string) error {
	return &config.FieldError{Path: b.at, Problem: problem + ", as " + a.label() + " does", Remedy: remedy}
}

const oneOfThem = "keep one of the two, with stores beside it"

// checkClashes finds the children that cannot share a request.
func checkClashes(children []child) error {
	var errs []error
	for j := range children {
		for i := range children[:j] {
			if err := checkPair(&children[i], &children[j]); err != nil {
				errs = append(errs, err)
				break
			}
		}
	}
	return errors.Join(errs...)
}

func checkPair(a, b *child) error {
	var none connector.Handoff
	switch {
	case a.traits.Handoff != none && b.traits.Handoff != none:
		return clash(a, b, "needs a handoff in P's answer", "an engine fails when two of its connectors answer with the same parameters; "+oneOfThem)
	case a.traits.Name == b.traits.Name && !a.traits.ContentStore:
		return clash(a, b, "uses the parameters of "+b.traits.Name, oneOfThem)
	}
	for _, s := range single {
		if s.does(a) && s.does(b) {
			return clash(a, b, "has to "+s.what, oneOfThem)
		}
	}
	for _, member := range a.traits.Members {
		// vLLM's connectors share one object; what they set in it is compared as each leg is described.
		if member != connector.ParamsMember && slices.Contains(b.traits.Members, member) {
			return clash(a, b, "sets "+member, oneOfThem)
		}
	}
	return nil
}

// describing puts those children last that make P end by length: what they set, the others' normalization would take away again.
func describing(children []child) []connector.KVConnector {
	var first, last []connector.KVConnector
	for i := range children {
		if children[i].traits.EndsByLength {
			last = append(last, children[i].KVConnector)
		} else {
			first = append(first, children[i].KVConnector)
		}
	}
	return append(first, last...)
}
