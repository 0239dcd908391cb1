// SPDX-License-Identifier: Apache-2.0

package model

import (
	"errors"
	"math"
	"slices"
)

// Observation is a step that was measured.
type Observation struct {
	Load
	Seconds float64
}

// row is what a step says of each term of StepTime.
type row [5]float64

// Fit finds the step time that explains observed steps best: least squares of the relative errors, no term below 0. The
// observations must differ in what they compute: a term that none of them shows apart from the others is 0. At least
// four are needed.
func Fit(steps []Observation) (StepTime, error) {
	if len(steps) < 4 {
		return StepTime{}, errors.New("model: four observed steps are needed at least")
	}
	// Columns are scaled, since terms differ by five orders of magnitude.
	var scale row
	rows := make([]row, len(steps))
	for i, s := range steps {
		least := min(s.Requests, s.ContextTokens, s.PrefillTokens, s.Attention)
		if !(s.Seconds > 0) || math.IsInf(s.Seconds, 0) || least < 0 {
			return StepTime{}, errors.New("model: an observed step has no time, or a number below 0")
		}
		rows[i] = row{1 / s.Seconds, float64(s.Requests) / s.Seconds, float64(s.ContextTokens) / s.Seconds,
			float64(s.PrefillTokens) / s.Seconds, float64(s.Attention) / s.Seconds}
		for k, x := range rows[i] {
			scale[k] = max(scale[k], x)
		}
	}
	used := make([]int, 0, len(scale))
	for k := range scale {
		if scale[k] > 0 {
			used = append(used, k)
		}
	}
	var terms row
	for len(used) > 0 {
		found, dependent := solve(rows, scale, used)
		if dependent >= 0 {
			used = slices.Delete(used, dependent, dependent+1)
			continue
		}
		lowest := 0
		for i := range found {
			if found[i] < found[lowest] {
				lowest = i
			}
		}
		if found[lowest] < 0 {
			used = slices.Delete(used, lowest, lowest+1)
			continue
		}
		for i, k := range used {
			terms[k] = found[i] / scale[k]
		}
		break
	}
	return StepTime{Base: terms[0], PerRequest: terms[1], PerContextToken: terms[2], PerPrefillToken: terms[3],
		PerAttention: terms[4]}, nil
}

// solve finds the scaled terms of the used columns by the normal equations of rows·terms = 1. dependent is the place of
// a column that follows from those before it, or -1.
func solve(rows []row, scale row, used []int) (found []float64, dependent int) {
	n := len(used)
	m := make([][]float64, n)
	for i := range m {
		m[i] = make([]float64, n+1)
	}
	for _, row := range rows {
		for i, k := range used {
			a := row[k] / scale[k]
			for j, l := range used {
				m[i][j] += a * row[l] / scale[l]
			}
			m[i][n] += a
		}
	}
	// The matrix is symmetric and positive: elimination needs no exchange of rows, and a pivot that vanishes belongs to
	// a column that depends on those before it.
	for i := range n {
		whole := 0.0
		for _, row := range rows {
			whole += row[used[i]] / scale[used[i]] * row[used[i]] / scale[used[i]]
		}
		if m[i][i] <= 1e-10*whole {
			return nil, i
		}
		for r := i + 1; r < n; r++ {
			f := m[r][i] / m[i][i]
			for c := i; c <= n; c++ {
				m[r][c] -= f * m[i][c]
			}
		}
	}
	found = make([]float64, n)
	for i := n - 1; i >= 0; i-- {
		found[i] = m[i][n]
		for c := i + 1; c < n; c++ {
			found[i] -= m[i][c] * found[c]
		}
		found[i] /= m[i][i]
	}
	return found, -1
}
