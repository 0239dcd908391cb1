// SPDX-License-Identifier: Apache-2.0

package model

// Gauges are what an engine says of its load.
type Gauges struct {
	Waiting, Running int     // requests; those that fetch KV wait, as vLLM counts them
	Fetching         int     // of those that wait
	KVUsage          float64 // of its blocks, 0 to 1; 0 without a bound
}

// Gauges reads them. They are those of the last event: a stretch of decode steps changes none but KVUsage.
func (e *Engine) Gauges() Gauges {
	g := Gauges{Waiting: e.Waiting() + e.fetching, Running: e.Running(), Fetching: e.fetching}
	if e.spec.Blocks > 0 {
		g.KVUsage = float64(e.UsedBlocks()) / float64(e.spec.Blocks)
	}
	return g
}
