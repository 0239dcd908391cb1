// SPDX-License-Identifier: Apache-2.0

package pdflow

var Version = built

// WithoutPickWait makes requests fail at once where no engine is ready.
func WithoutPickWait() Option {
	return optionFunc(func(o *options) error { o.pickWait = 0; return nil })
}

// LetRunOn sets how many prefill legs may run on at one engine.
func LetRunOn(f *Flow, n int) { f.runningOn.most = n }

// RescuePlaces returns how many engines have rescues under way.
func RescuePlaces(f *Flow) int { return f.rescueQueue.Engines() }

// RunningOn returns how many prefill legs of requests that are over have not ended.
func RunningOn(f *Flow) int { return f.runningOn.Count() }
