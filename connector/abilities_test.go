// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector"
)

type fake struct{}

func (fake) Traits() connector.Traits { return connector.Traits{Name: "fake"} }
func (fake) Prefill(context.Context, *connector.Session, *connector.Leg) error {
	return nil
}

func (fake) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

type checked struct {
	fake
	health error
}

func (l checked) HealthCheck(context.Context) error { return l.health }

type wrapper struct {
	fake
	inner connector.KVConnector
}

func (w wrapper) Unwrap() connector.KVConnector { return w.inner }

type multi struct {
	fake
	children []connector.KVConnector
}

func (m multi) Unwrap() []connector.KVConnector { return m.children }

type checkedWrapper struct {
	wrapper
	health error
}

func (l checkedWrapper) HealthCheck(context.Context) error { return l.health }

func TestAsFindsAnAbility(t *testing.T) {
	errOne, errTwo, errOuter := errors.New("one"), errors.New("two"), errors.New("outer")
	one, two := checked{health: errOne}, checked{health: errTwo}
	for _, c := range []struct {
		rule string
		c    connector.KVConnector
		want error // nil: not found
	}{
		{"in the connector itself", one, errOne},
		{"in what it wraps", wrapper{inner: one}, errOne},
		{"through several wrappers", wrapper{inner: wrapper{inner: one}}, errOne},
		{"in the outer one first", checkedWrapper{wrapper{inner: one}, errOuter}, errOuter},
		{"in the first child that has it", multi{children: []connector.KVConnector{fake{}, two, one}}, errTwo},
		{"depth first", multi{children: []connector.KVConnector{wrapper{inner: one}, two}}, errOne},
		{"nowhere", multi{children: []connector.KVConnector{fake{}, wrapper{inner: fake{}}}}, nil},
		{"nowhere, without children", multi{}, nil},
		{"nowhere, wrapping nothing", wrapper{}, nil},
		{"nowhere, plain", fake{}, nil},
		{"nowhere, nil", nil, nil},
	} {
		t.Run(c.rule, func(t *testing.T) {
			h, ok := connector.As[connector.HealthChecker](c.c)
			assert.Equal(t, c.want != nil, ok)
			if ok {
				assert.Equal(t, c.want, h.HealthCheck(t.Context()))
			}
		})
	}
}
