// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
)

func checkName(t *trial) error {
	name := t.traits.Name
	if name == "" || name != strings.ToLower(name) || strings.ContainsAny(name, " \t\n") {
		return fmt.Errorf("its Name is %q: want lower case, without spaces", name)
	}
	registered := slices.Contains(names.Connectors(), name)
	switch {
	case t.Harness.Name == "":
		return nil
	case t.Harness.Name != name:
		return fmt.Errorf("its Name is %q, but the harness says %q", name, t.Harness.Name)
	case !registered:
		return fmt.Errorf("%q is not registered", name)
	}
	opened, err := connector.Open(config.Spec{Type: name, Config: slices.Clone(t.Config)})
	if err != nil {
		return fmt.Errorf("opening the registered name: %w", err)
	}
	if n := opened.Traits().Name; n != name {
		return fmt.Errorf("what is registered as %q has the name %q", name, n)
	}
	return nil
}

func checkOrder(t *trial) error {
	_, cold := connector.As[connector.ColdDetector](t.c)
	_, expects := connector.As[connector.Expecter](t.c)
	switch t.traits.Order {
	case connector.PrefillThenDecode:
	case connector.DecodeFirst:
		if !cold {
			return errors.New("it decodes first, so it must be a ColdDetector")
		}
	case connector.DecodeThenPrefill:
		if !expects {
			return errors.New("prefill follows decode's event, so it must be an Expecter")
		}
	case connector.Together:
		if expects {
			return errors.New("it is an Expecter, but legs that run together wait for no event")
		}
	default:
		return fmt.Errorf("its Order is %d: unknown", t.traits.Order)
	}
	return nil
}

// checkUnsupported checks that what Traits declares to be carried, the connector's own CheckRequest lets pass.
func checkUnsupported(t *trial) error {
	for _, api := range t.apis {
		list := append(samples(api), t.carried(api)...)
		if t.traits.Handoff.MultiUse {
			list = append(list, several(api)...)
		}
		for _, s := range list {
			r := request(s)
			reason := t.unsupported(r)
			if reason != t.unsupported(r) {
				return fmt.Errorf("%s: the reason is not constant", s)
			}
			if reason != "" && !slices.Contains(t.Except.Refuses, reason) {
				return fmt.Errorf("%s: is refused for %q, although Traits declares that the protocol carries it", s,
					reason)
			}
		}
	}
	return nil
}

// carried are the requests that mostly one handoff cannot serve, and that this protocol carries, as it declares.
func (t *trial) carried(api connector.API) (list []sample) {
	for member, body := range uncarried(api) {
		if slices.Contains(t.traits.Carries, member) {
			list = append(list, sample{api, "with " + member, body})
		}
	}
	return list
}

// uncarried are requests that one handoff cannot serve, by the member that prevents it ([check.Rules.Declared]
// has the sources).
func uncarried(api connector.API) map[string]string {
	s := shapes[api]
	m := map[string]string{}
	switch api {
	case connector.APICompletions:
		m["prompt"] = `{"prompt":["` + plantedPrompt + `","b"]}`
		m["use_beam_search"] = s.body(`"use_beam_search":true`)
		m["prompt_logprobs"] = s.body(`"prompt_logprobs":1`)
	case connector.APIChat:
		m["use_beam_search"] = s.body(`"use_beam_search":true`)
		m["prompt_logprobs"] = s.body(`"prompt_logprobs":1`)
	case connector.APIGenerate:
		m["prompt_logprobs"] = s.body(`"prompt_logprobs":1`)
	case connector.APISGLang:
		m["text"] = `{"text":["` + plantedPrompt + `","b"]}`
	case connector.APIResponses:
		m["background"] = s.body("", `"background":true`)
	}
	return m
}
