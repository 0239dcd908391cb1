// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestMedianIsTheMiddleAndBetweenTwoMiddles(t *testing.T) {
	assert.Zero(t, median(nil))
	assert.InDelta(t, 7, median([]float64{7}), 0)
	assert.InDelta(t, 2, median([]float64{9, 1, 2}), 0)
	assert.InDelta(t, 2.5, median([]float64{9, 1, 2, 3}), 0)
}

func TestMedianLeavesItsInputAsItIs(t *testing.T) {
	list := []float64{3, 1, 2}
	median(list)
	assert.Equal(t, []float64{3, 1, 2}, list)
}

func TestPercentileIsOneOfTheValues(t *testing.T) {
	hundred := make([]int, 100)
	for i := range hundred {
		hundred[i] = i + 1
	}
	assert.Equal(t, 50, percentile(hundred, 50))
	assert.Equal(t, 99, percentile(hundred, 99))
	assert.Equal(t, 1, percentile(hundred, 0))
	assert.Equal(t, 7, percentile([]int{7}, 99))
	assert.Zero(t, percentile([]int(nil), 50))
}

func TestCostIsCPUTimePerUnitInMicroseconds(t *testing.T) {
	assert.InDelta(t, 50, slice{units: 1000, cpu: 50 * time.Millisecond}.cost(), 1e-9)
}

func TestRateAndBusyAreOverAllSlices(t *testing.T) {
	s := series{slices: []slice{
		{units: 100, wall: time.Second, cpu: time.Second / 2},
		{units: 500, wall: 3 * time.Second, cpu: time.Second / 2},
	}}
	assert.InDelta(t, 150, rate(s), 1e-9)
	assert.InDelta(t, 0.25, busy(s), 1e-9)
}
