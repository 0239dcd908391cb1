// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector"
)

type fake struct{}

func (fake) Name() string           { return "fake" }
func (fake) Order() connector.Order { return connector.PrefillThenDecode }
func (fake) Prefill(context.Context, *connector.Session, *connector.Leg) error {
	return nil
}

func (fake) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

type leaser struct {
	fake
	lease time.Duration
}

func (l leaser) Lease() time.Duration { return l.lease }

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

type leasingWrapper struct {
	wrapper
	lease time.Duration
}

func (l leasingWrapper) Lease() time.Duration { return l.lease }

func TestAsFindsAnAbility(t *testing.T) {
	one, two := leaser{lease: 1}, leaser{lease: 2}
	for _, c := range []struct {
		rule string
		c    connector.KVConnector
		want time.Duration // 0: not found
	}{
		{"in the connector itself", one, 1},
		{"in what it wraps", wrapper{inner: one}, 1},
		{"through several wrappers", wrapper{inner: wrapper{inner: one}}, 1},
		{"in the outer one first", leasingWrapper{wrapper{inner: one}, 7}, 7},
		{"in the first child that has it", multi{children: []connector.KVConnector{fake{}, two, one}}, 2},
		{"depth first", multi{children: []connector.KVConnector{wrapper{inner: one}, two}}, 1},
		{"nowhere", multi{children: []connector.KVConnector{fake{}, wrapper{inner: fake{}}}}, 0},
		{"nowhere, without children", multi{}, 0},
		{"nowhere, wrapping nothing", wrapper{}, 0},
		{"nowhere, plain", fake{}, 0},
		{"nowhere, nil", nil, 0},
	} {
		t.Run(c.rule, func(t *testing.T) {
			l, ok := connector.As[connector.Leaser](c.c)
			assert.Equal(t, c.want != 0, ok)
			if ok {
				assert.Equal(t, c.want, l.Lease())
			}
		})
	}
}
