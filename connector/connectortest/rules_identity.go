// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

func checkName(t *trial) error {
	name := t.traits.Name
	if name == "" || name != strings.ToLower(name) || strings.ContainsAny(name, " \t\n") {
		return fmt.Errorf("its Name is %q: want lower case, without spaces", name)
	}
	again, err := t.New(slices.Clone(t.Config))
	if err != nil {
		return fmt.Errorf("a second New: %w", err)
	}
	if n := t.c.Traits().Name; n != name || again.Traits().Name != name {
		return fmt.Errorf("its Name is %q once and %q then", name, n)
	}
	registered := slices.Contains(connector.Names(), name)
	switch {
	case t.Harness.Name == "":
		return nil
	case t.Harness.Name != name:
		return fmt.Errorf("its Name is %q, but the harness says %q", name, t.Harness.Name)
	case !registered:
		return fmt.Errorf("%q is not registered", name)
	}
	opened, err := connector.Open(connector.Spec{Type: name, Config: slices.Clone(t.Config)})
	if err != nil {
		return fmt.Errorf("opening the registered name: %w", err)
	}
	if n := opened.Traits().Name; n != name {
		return fmt.Errorf("what is registered as %q has the name %q", name, n)
	}
	return nil
}

func checkOrder(t *trial) error {
	order := t.traits.Order
	if order > connector.DecodeThenPrefill {
		return fmt.Errorf("its Order is %d: unknown", order)
	}
	for range 3 {
		if now := t.c.Traits().Order; now != order {
			return fmt.Errorf("its Order is %s once and %s then", order, now)
		}
	}
	for _, o := range t.traits.OtherOrders {
		if o > connector.DecodeThenPrefill {
			return fmt.Errorf("its OtherOrders has %d: unknown", o)
		}
	}
	if lease := t.traits.Lease; lease < 0 || t.c.Traits().Lease != lease {
		return errors.New("its Lease is negative or not constant")
	}
	_, cold := connector.As[connector.ColdDetector](t.c)
	_, expects := connector.As[connector.Expecter](t.c)
	switch {
	case order == connector.DecodeFirst && !cold:
		return errors.New("it decodes first, so it must be a ColdDetector")
	case order == connector.DecodeThenPrefill && !expects:
		return errors.New("prefill follows decode's event, so it must be an Expecter")
	case order == connector.Together && expects:
		return errors.New("it is an Expecter, but legs that run together wait for no event")
	}
	return nil
}

func checkUnsupported(t *trial) error {
	for _, api := range connector.APIs() {
		r, err := request(plain(api))
		if err != nil {
			return err
		}
		reason := t.unsupported(r)
		switch carried := slices.Contains(t.APIs, api); {
		case carried && reason != "":
			return fmt.Errorf("a plain request of %s is refused for %q, but the harness says that the API is carried", api, reason)
		case !carried && reason == "":
			return fmt.Errorf("a plain request of %s has no reason against it, but the harness does not say that the API is carried", api)
		}
	}
	for _, api := range t.APIs {
		for _, s := range append(samples(api), several(api)...) {
			r, err := request(s)
			if err != nil {
				return err
			}
			reason := t.unsupported(r)
			if reason != t.unsupported(r) {
				return fmt.Errorf("%s: the reason is not constant", s)
			}
			if reason != "" && !slices.Contains(shapes[api].answers, reason) && !slices.Contains(t.Except.Refuses, reason) {
				return fmt.Errorf("%s: is refused for %q", s, reason)
			}
		}
		for member, body := range uncarried(api) {
			r, err := request(sample{api, member, body})
			if err != nil {
				return err
			}
			reason := t.unsupported(r)
			if reason == "" && !slices.Contains(t.Except.Carries, member) {
				return fmt.Errorf("%s: a request with %s has no reason against it, and Except.Carries does not name it", api, member)
			}
			if strings.Contains(reason, "canary") || len(reason) > 64 {
				return fmt.Errorf("%s: the reason against %s is not a member's name", api, member)
			}
		}
	}
	return nil
}

// uncarried are requests that one handoff cannot serve, by the member that prevents it (connector.Traits.CheckRequest says why).
func uncarried(api connector.API) map[string]string {
	s := shapes[api]
	m := map[string]string{}
	switch api {
	case connector.APICompletions:
		m["prompt"] = `{"prompt":["` + promptCanary + `","b"]}`
		m["use_beam_search"] = s.body(`"use_beam_search":true,"n":2`)
		m["prompt_logprobs"] = s.body(`"prompt_logprobs":1`)
	case connector.APIChat:
		m["use_beam_search"] = s.body(`"use_beam_search":true,"n":2`)
		m["prompt_logprobs"] = s.body(`"prompt_logprobs":1`)
	case connector.APIGenerate:
		m["prompt_logprobs"] = s.body(`"prompt_logprobs":1`)
	case connector.APISGLang:
		m["text"] = `{"text":["` + promptCanary + `","b"]}`
	case connector.APIResponses:
		m["background"] = s.body("", `"background":true`)
	}
	return m
}
