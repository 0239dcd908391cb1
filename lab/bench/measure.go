// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/lab/bench/internal/load"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// measureAll compares the gateway with minimal in every figure that the project has a target for, and peers with
// minimal in the same slices. If before is not "", it is the program of an earlier gateway, and takes minimal's place.
func (l *lab) measureAll(ctx context.Context, peers []peer, only, before string) (*report, error) {
	gatewayBinary, err := proc.Build(ctx, l.dir, proc.Gateway)
	if err != nil {
		return nil, err
	}
	minimalBinary, err := proc.Build(ctx, l.dir, minimalPackage)
	if err != nil {
		return nil, err
	}
	if err := l.pin(); err != nil {
		return nil, err
	}
	gatewayRecipe := l.gateway(gatewayBinary, "gateway", l.engines)
	minimalRecipe := l.minimal(minimalBinary, "minimal")
	if before != "" {
		minimalRecipe = l.gateway(before, "before", l.engines)
	}
	contenders, err := l.contenders(ctx, peers)
	if err != nil {
		return nil, err
	}
	r := &report{title: "Load benchmark", machine: thisMachine(), pace: l.pace, peers: peers}

	if only == "" {
		if err := l.alone(ctx, r, gatewayRecipe, minimalRecipe); err != nil {
			return nil, err
		}
		if err := l.peersAlone(ctx, r, contenders); err != nil {
			return nil, err
		}
	}
	gateway, _, err := l.start(ctx, gatewayRecipe)
	if err != nil {
		return nil, err
	}
	minimal, _, err := l.start(ctx, minimalRecipe)
	if err != nil {
		return nil, err
	}
	for _, s := range l.pace.chosen(only) {
		c, err := l.compare(ctx, s, gateway, minimal, contenders...)
		if err != nil {
			return nil, err
		}
		r.compared = append(r.compared, c)
	}
	if strings.Contains(halfLoad.name, only) {
		if r.half, err = l.atHalfLoad(ctx, gateway, minimal, contenders); err != nil {
			return nil, err
		}
	}
	for i, n := range fleets {
		s := fleetScenario(n)
		if only != "" && !strings.Contains(s.name, only) || only == "" && l.pace.quick && i > 0 {
			continue
		}
		c, err := l.manyEndpoints(ctx, gatewayBinary, gateway, s, n, contenders)
		if err != nil {
			return nil, err
		}
		r.endpoints = append(r.endpoints, c)
	}
	l.count(r)
	return r, nil
}

// peersAlone measures the memory and the start of peers.
func (l *lab) peersAlone(ctx context.Context, r *report, contenders []*contender) error {
	for _, c := range contenders {
		f := l.peerFootprint(ctx, c)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.footprints = append(r.footprints, f)
	}
	return nil
}

// atHalfLoad measures times to the first token at half of the gateway's capacity.
func (l *lab) atHalfLoad(ctx context.Context, gateway, minimal *program, peers []*contender) (*compared, error) {
	var capacity series
	for range l.pace.direct {
		got, err := l.slice(ctx, halfLoad, gateway)
		if err != nil {
			return nil, err
		}
		capacity.slices = append(capacity.slices, got)
	}
	s := halfLoad
	s.rate = rate(capacity) / float64(s.chunks) / 2
	c, err := l.compare(ctx, s, gateway, minimal, peers...)
	return &c, err
}

// alone measures the start and the memory of each program by itself.
func (l *lab) alone(ctx context.Context, r *report, recipes ...recipe) error {
	for _, recipe := range recipes {
		times, err := l.starts(ctx, recipe)
		if err != nil {
			return err
		}
		f, err := l.footprint(ctx, recipe)
		if err != nil {
			return err
		}
		f.started = times
		r.footprints = append(r.footprints, f)
	}
	return nil
}

// fleetScenario is the load of a gateway with n endpoints.
func fleetScenario(n int) scenario {
	s := scenarios[0]
	s.name = fmt.Sprintf("%d endpoints against two", n)
	s.target = targetEndpoints
	return s
}

// manyEndpoints compares a gateway that has n endpoints, all of which answer health probes, with one that has
// two, and peers alike.
func (l *lab) manyEndpoints(ctx context.Context, binary string, two *program, s scenario, n int,
	peers []*contender) (compared, error) {
	engines, err := load.StartEngines(ctx, l.board, n/2)
	if err != nil {
		return compared{}, err
	}
	defer engines.Close()
	many, _, err := l.start(ctx, l.gateway(binary, fmt.Sprint("gateway-", n), engines))
	if err != nil {
		return compared{}, err
	}
	c, err := l.compare(ctx, s, many, two)
	if err != nil {
		return c, err
	}
	if err := many.stop(); err != nil {
		return c, err
	}
	for _, p := range peers {
		r, err := l.peerFleet(ctx, s, p, n)
		if err != nil {
			return c, err
		}
		c.peers = append(c.peers, r)
	}
	return c, nil
}

// count adds the legs that were served, and the faults, to the report.
func (l *lab) count(r *report) {
	r.prefills, r.decodes = l.board.Served()
	r.faults, r.faultCount = l.board.Faults()
}

// calibration is the CPU time that a variant of minimal burns in addition for each request.
const calibration = 20 * time.Microsecond

// checkItself tests the benchmark: it must find two equal programs equal, and a program that burns a known time for
// each request dearer by that time.
func (l *lab) checkItself(ctx context.Context, only string) (*report, error) {
	binary, err := proc.Build(ctx, l.dir, minimalPackage)
	if err != nil {
		return nil, err
	}
	if err := l.pin(); err != nil {
		return nil, err
	}
	r := &report{title: "The benchmark against itself", machine: thisMachine(), pace: l.pace, calibration: true}
	recipes := []recipe{
		l.minimal(binary, "minimal-again"),
		l.minimal(binary, "minimal"),
		l.minimal(binary, "minimal-spin", "-spin", calibration.String()),
	}
	if only == "" {
		if err := l.alone(ctx, r, recipes[:2]...); err != nil {
			return nil, err
		}
	}
	var programs []*program
	for _, recipe := range recipes {
		p, _, err := l.start(ctx, recipe)
		if err != nil {
			return nil, err
		}
		programs = append(programs, p)
	}
	again, minimal, spin := programs[0], programs[1], programs[2]
	list := l.pace.chosen(only)
	for _, s := range list {
		s.target = 1.03
		c, err := l.compare(ctx, s, again, minimal)
		if err != nil {
			return nil, err
		}
		r.compared = append(r.compared, c)
	}
	if i := slices.IndexFunc(list, func(s scenario) bool { return !s.stream }); i >= 0 {
		c, err := l.compare(ctx, list[i], spin, minimal)
		if err != nil {
			return nil, err
		}
		r.spin = &c
	}
	l.count(r)
	return r, nil
}
