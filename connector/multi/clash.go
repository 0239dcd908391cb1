// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"errors"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
)

// orders are the orders in which a child works; its preferred one is the first.
func (c *Child) orders() []connector.Order {
	return append([]connector.Order{c.traits.Order}, c.traits.OtherOrders...)
}

// commonOrder finds an order that suits all children. Stores find content by the prompt alone and suit any order. Of
// the others' common orders it prefers that of the first one.
func commonOrder(children []Child) (connector.Order, error) {
	bound := slices.DeleteFunc(slices.Clone(children), func(c Child) bool { return c.traits.Handoff.ContentStore })
	if len(bound) == 0 {
		return children[0].traits.Order, nil
	}
	for _, o := range bound[0].orders() {
		if !slices.ContainsFunc(bound[1:], func(c Child) bool { return !slices.Contains(c.orders(), o) }) {
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
	return 0, &config.FieldError{Path: "connectors",
		Problem: "have no order of the legs in common: " + strings.Join(each, ", "),
		Remedy:  "keep one of them; the other can be a second kvConnector by fallback: connector"}
}

// single are the abilities of which only one child can act on a request.
var single = []struct {
	what string
	does func(*Child) bool
}{
	{"make a side call before the legs", has[connector.Preparer]},
	// A store only waits for a time to pass, which any child can do besides another.
	{"wait for a notice between the legs", func(c *Child) bool {
		return !c.traits.Handoff.ContentStore && has[connector.Expecter](c)
	}},
	{"end requests with P's response", has[connector.Finisher]},
	{"rewrite D's response", has[connector.Rewriter]},
	{"judge P's response while D runs", has[connector.PrefillChecker]},
	{"ask D first and judge its response", func(c *Child) bool {
		return c.traits.Order == connector.DecodeFirst && has[connector.ColdDetector](c)
	}},
	{"add an encode stage", has[connector.Encoder]},
	{"give the legs an X-Request-Id of its own", func(c *Child) bool { return c.traits.OwnRequestID }},
}

func has[T any](c *Child) bool {
	_, ok := connector.As[T](c.KVConnector)
	return ok
}

func clash(a, b *Child, problem, remedy string) error {
	return &config.FieldError{Path: b.At, Problem: problem + ", as " + a.label() + " does", Remedy: remedy}
}

const oneOfThem = "keep one of the two, with stores beside it"

// checkClashes finds children that cannot share a request.
func checkClashes(children []Child) error {
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

func checkPair(a, b *Child) error {
	switch {
	case a.traits.Handoff.Named() && b.traits.Handoff.Named():
		return clash(a, b, "needs a handoff in P's response",
			"an engine fails when two of its connectors answer with the same parameters; "+oneOfThem)
	case a.traits.Name == b.traits.Name && !a.traits.Handoff.ContentStore:
		return clash(a, b, "uses the parameters of "+b.traits.Name, oneOfThem)
	}
	for _, s := range single {
		if s.does(a) && s.does(b) {
			return clash(a, b, "has to "+s.what, oneOfThem)
		}
	}
	for _, member := range a.traits.Members {
		// vLLM's connectors share this object. What they set in it is compared when each leg is built.
		if member != connector.ParamsMember && slices.Contains(b.traits.Members, member) {
			return clash(a, b, "sets "+member, oneOfThem)
		}
	}
	return nil
}

// describing puts those children last that make P end by length, since the normalization of other children would undo
// what they set.
func describing(children []Child) []connector.KVConnector {
	var first, last []connector.KVConnector
	for i := range children {
		if children[i].traits.Ending.EndsByLength {
			last = append(last, children[i].KVConnector)
		} else {
			first = append(first, children[i].KVConnector)
		}
	}
	return append(first, last...)
}
