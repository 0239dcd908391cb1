// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"slices"
	"time"
)

// median of an unsorted list; 0 for an empty one.
func median(list []float64) float64 {
	if len(list) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(list))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// percentile returns the smallest value of a sorted list that at least p percent of the values do not exceed; 0 for an
// empty list.
func percentile[T cmp.Ordered](sorted []T, p int) T {
	if len(sorted) == 0 {
		var zero T
		return zero
	}
	rank := (p*len(sorted) + 99) / 100
	return sorted[max(rank, 1)-1]
}

// costs lists the CPU time per unit of each slice, in microseconds.
func costs(s series) []float64 {
	var list []float64
	for _, slice := range s.slices {
		list = append(list, slice.cost())
	}
	return list
}

// latencies are the samples of all slices, sorted.
func latencies(s series) []time.Duration {
	var all []time.Duration
	for _, slice := range s.slices {
		all = append(all, slice.samples...)
	}
	slices.Sort(all)
	return all
}

// rate is units per second over all slices.
func rate(s series) float64 {
	var units, seconds float64
	for _, slice := range s.slices {
		units += float64(slice.units)
		seconds += slice.wall.Seconds()
	}
	return units / max(seconds, 1e-9)
}

// busy returns the share of its CPU that a program used.
func busy(s series) float64 {
	var used, wall time.Duration
	for _, slice := range s.slices {
		used += slice.cpu
		wall += slice.wall
	}
	return float64(used) / float64(max(wall, 1))
}
