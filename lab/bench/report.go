// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// report is everything that was measured.
type report struct {
	title       string
	machine     machine
	pace        pace
	took        time.Duration
	calibration bool
	peers       []peer
	pictures    []picture // files beside the report

	footprints []footprint
	compared   []compared
	endpoints  []compared
	half       *compared // samples are times to the first token
	spin       *compared

	prefills, decodes int64
	faults            []string
	faultCount        int
}

// finding is one figure beside its target.
type finding struct {
	name   string
	value  float64
	target float64
}

// findings lists the figures that have targets.
func (r *report) findings() []finding {
	var list []finding
	for _, c := range r.compared {
		list = append(list, finding{c.scenario.name, median(c.ratios), c.scenario.target})
	}
	for _, c := range r.endpoints {
		list = append(list, finding{c.scenario.name, median(c.ratios), targetEndpoints})
	}
	if len(r.footprints) > 0 {
		list = append(list, finding{"memory per open stream", median(r.footprints[0].perStream), targetStreamBytes},
			finding{"start to first response", float64(middleOf(r.footprints[0].started)), float64(targetStart)})
	}
	return list
}

// farBeyond is from how many times its target on a figure fails a short run.
const farBeyond = 2.5

// verdict returns an error if a response was wrong and, in a short run, whose figures nobody reads, if a figure is far
// beyond its target.
func (r *report) verdict(p pace) error {
	var errs []error
	if r.faultCount > 0 {
		errs = append(errs, fmt.Errorf("%d faults, the first:\n  %s", r.faultCount, strings.Join(r.faults, "\n  ")))
	}
	if r.calibration {
		return errors.Join(append(errs, r.calibrated(p))...)
	}
	for _, f := range r.findings() {
		if p.quick && f.value > farBeyond*f.target {
			errs = append(errs, fmt.Errorf("%s: %.4g is more than %.3g times the target %.4g", f.name, f.value,
				farBeyond, f.target))
		}
	}
	return errors.Join(errs...)
}

// calibrated returns an error if the benchmark has measured known costs wrongly.
func (r *report) calibrated(p pace) error {
	width := 0.03
	if p.quick {
		width = 0.15 // half-second slices, taken once
	}
	var errs []error
	for _, c := range r.compared {
		if m := median(c.ratios); m < 1-width || m > 1+width {
			errs = append(errs, fmt.Errorf("%s: two equal programs differ by the ratio %.3f", c.scenario.name, m))
		}
	}
	if r.spin != nil {
		if seen := r.spinSeen(); seen < 0.7 || seen > 1.3 {
			errs = append(errs, fmt.Errorf("the variant of minimal burns %v more for each request, and the benchmark "+
				"measured %.0f %% of it", calibration, 100*seen))
		}
	}
	return errors.Join(errs...)
}

// spinSeen returns the measured slowdown as a share of the known one, from neighbouring slices.
func (r *report) spinSeen() float64 {
	var more []float64
	base := costs(r.spin.base)
	for i, cost := range costs(r.spin.subject) {
		more = append(more, cost-base[i])
	}
	return median(more) / (float64(calibration) / 1e3)
}

func middleOf(times []time.Duration) time.Duration {
	return percentile(slices.Sorted(slices.Values(times)), 50)
}
