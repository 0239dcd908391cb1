// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// refusal makes a connector that must not be: the faults, or what is wrong with them.
func (t *trial) refusal(settings string) ([]*config.FieldError, error) {
	var c connector.KVConnector
	err := guard(func() (err error) { c, err = t.New(json.RawMessage(settings)); return err })
	switch {
	case panicked(err):
		return nil, err
	case err == nil:
		_ = c
		return nil, errors.New("it is accepted")
	}
	if _, ok := errors.AsType[*config.FieldError](err); !ok {
		return nil, fmt.Errorf("the error is no FieldError: %w", err)
	}
	return config.FieldErrors(err), nil
}

// config returns the harness's settings as an object.
func (t *trial) config() json.RawMessage {
	if gjson.ParseBytes(t.Config).IsObject() {
		return t.Config
	}
	return json.RawMessage("{}")
}

func checkConfig(t *trial) error {
	if err := t.emptyConfig(); err != nil {
		return err
	}
	with, err := jsonedit.SetIn(t.config(), "noSuchSettingAtAll", json.RawMessage(`"`+plantedValue+`"`))
	if err != nil {
		return fmt.Errorf("the harness: Config: %w", err)
	}
	if err := t.refusesAt(string(with), "noSuchSettingAtAll", ""); err != nil {
		return fmt.Errorf("an unknown setting: %w", err)
	}
	for _, whole := range []string{"[]", `"x"`, "1", "true", "{", "{}{}", `{"a"}`, strings.Repeat("[", 10_000),
		"\xff"} {
		if _, err := t.refusal(whole); err != nil {
			return fmt.Errorf("a configuration of %.20q: %w", whole, err)
		}
	}
	for _, key := range keys(t.config()) {
		if err := t.checkKey(key); err != nil {
			return err
		}
	}
	for i, bad := range t.BadConfig {
		faults, err := t.refusal(string(bad))
		if err != nil {
			return fmt.Errorf("BadConfig[%d]: %w", i, err)
		}
		for _, fe := range faults {
			if fe.Path == "" {
				return fmt.Errorf("BadConfig[%d]: the fault names no field: %w", i, fe)
			}
		}
	}
	return nil
}

func (t *trial) emptyConfig() error {
	for _, empty := range []string{"", "null", "{}", " \n"} {
		err := guard(func() error { _, err := t.New(json.RawMessage(empty)); return err })
		switch {
		case panicked(err):
			return fmt.Errorf("the configuration %q: %w", empty, err)
		case err != nil && !t.Except.NeedsConfig:
			return fmt.Errorf("the configuration %q is refused: %w", empty, err)
		case err == nil && t.Except.NeedsConfig:
			return fmt.Errorf("the configuration %q is accepted, but the harness says that it needs one", empty)
		}
	}
	return nil
}

// checkKey misspells, doubles and spoils one setting.
func (t *trial) checkKey(key string) error {
	value, _ := mustParse(t.config()).Get(key)
	if t.Except.NeedsConfig || len(key) >= 3 {
		without, err := jsonedit.DeleteIn(t.config(), key)
		if err != nil {
			return err
		}
		misspelt, err := jsonedit.SetIn(without, key+"q", value)
		if err != nil {
			return err
		}
		if err := t.refusesAt(string(misspelt), key+"q", key); err != nil {
			return fmt.Errorf("%s misspelt as %sq: %w", key, key, err)
		}
	}
	member := string(connector.Quote(key)) + ":" + string(value)
	if err := t.refusesAt("{"+member+","+member+"}", key, ""); err != nil {
		return fmt.Errorf("%s given twice: %w", key, err)
	}
	for _, wrong := range []string{`["` + plantedValue + `",{}]`, `{"` + "x" + `":"` + plantedValue + `"}`, `"` +
		plantedValue + `"`, "-7.5"} {
		body, err := jsonedit.SetIn(t.config(), key, json.RawMessage(wrong))
		if err != nil {
			return err
		}
		err = guard(func() error { _, err := t.New(body); return err })
		switch {
		case panicked(err):
			return fmt.Errorf("%s of another kind: %w", key, err)
		case err != nil && strings.Contains(err.Error(), plantedValue):
			return fmt.Errorf("%s of another kind: the error repeats the value, which may be a secret: %w", key, err)
		}
	}
	return nil
}

// refusesAt wants a fault at a path, and if near is given that its remedy names it.
func (t *trial) refusesAt(config, path, near string) error {
	faults, err := t.refusal(config)
	if err != nil {
		return err
	}
	for _, fe := range faults {
		if strings.Contains(fe.Error(), plantedValue) {
			return fmt.Errorf("the error repeats a value, which may be a secret: %w", fe)
		}
		if fe.Path == path {
			if !strings.Contains(fe.Remedy, near) {
				return fmt.Errorf("the remedy of %q does not name %s", fe.Error(), near)
			}
			return nil
		}
	}
	return fmt.Errorf("no fault has the path %s: %w", path, faults[0])
}

func mustParse(raw json.RawMessage) *jsonedit.Doc {
	d, err := jsonedit.Parse(raw)
	if err != nil {
		return new(jsonedit.Doc)
	}
	return d
}

// keys are the names of an object's members, in its order.
func keys(raw json.RawMessage) []string {
	d := mustParse(raw)
	names := make([]string, 0, d.Len())
	for i := range d.Len() {
		names = append(names, d.Name(i))
	}
	return names
}

func checkSecrets(t *trial) error {
	secrets := []string{plantedPrompt, plantedClient, plantedRequest, plantedValue, hostP, hostD, t.Prefill.Host(),
		t.Decode.Host()}
	tell := func(what string, err error) error {
		if err == nil {
			return nil
		}
		for _, s := range secrets {
			if strings.Contains(err.Error(), s) {
				return fmt.Errorf("%s: the error holds %s: %w", what, s, err)
			}
		}
		return nil
	}
	err := t.each(plains, func(_ sample, p *played) error {
		bad := p.response.with(plantedBodies(p.response.Body))
		if name := t.traits.Handoff.Header; name != "" {
			bad = append(bad, p.response.spoilHeader(name)...)
		}
		for _, b := range bad {
			_, err := t.again(p, t.giving(b.Response))
			if err := tell("P's response: "+b.what, err); err != nil {
				return err
			}
		}
		if t.Event == nil {
			return nil
		}
		for _, b := range plantedBodies(t.Event(p.s).Body) {
			m := t.means()
			m.event = func(*connector.Session) connector.Event { return connector.Event{Body: b.body, At: began} }
			_, err := t.again(p, m)
			if err := tell("an event: "+b.what, err); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return t.callSecrets(tell)
}
