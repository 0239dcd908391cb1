// SPDX-License-Identifier: Apache-2.0

package paced

import (
	"strconv"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/model"
)

// Fleet is prefill engines and, after them, decode engines.
type Fleet struct {
	Prefill int
	Specs   []model.Spec
	Link    model.Link
	URLs    []string // of engines that run: those that Start has started, or real ones
}

// Start starts the engines. Those that decode serve alone, too.
func (f *Fleet) Start() (stop func(), err error) {
	var all []*enginesim.Engine
	stop = func() {
		for _, e := range all {
			_ = e.Close()
		}
	}
	f.URLs = nil
	for i := range f.Specs {
		cfg := enginesim.Config{Timing: &f.Specs[i], Link: f.Link, KVRole: enginesim.RoleProducer, KeepRequests: -1}
		if i >= f.Prefill {
			cfg.KVRole = enginesim.RoleBoth
		}
		e, err := enginesim.Start(cfg)
		if err != nil {
			stop()
			return nil, err
		}
		all, f.URLs = append(all, e), append(f.URLs, e.URL())
	}
	return stop, nil
}

// Name is an engine's ID in discovery.
func (f *Fleet) Name(i int) string {
	if i < f.Prefill {
		return "p" + strconv.Itoa(i)
	}
	return "d" + strconv.Itoa(i-f.Prefill)
}

// Set is a set of the engines.
func (f *Fleet) Set() (*discovery.Set, error) {
	var all []discovery.Endpoint
	for i, url := range f.URLs {
		role := discovery.RolePrefill
		if i >= f.Prefill {
			role = discovery.RoleDecode
		}
		e, err := discovery.New(url, role)
		if err != nil {
			return nil, err
		}
		e.ID = f.Name(i)
		all = append(all, e)
	}
	return static.NewSet(all...)
}
