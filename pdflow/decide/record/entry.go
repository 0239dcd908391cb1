// SPDX-License-Identifier: Apache-2.0

package record

import (
	"fmt"
	"time"

	"github.com/pdkit/pdkit/pdflow/decide"
)

// Version is the version of the files that this package writes, and the newest that it reads.
const Version = 1

// Header is the first line of a file.
type Header struct {
	Version int       `json:"pdkitDecisions"`
	Began   time.Time `json:"began"`
	// Recorder has another value for each [Recorder], and After tells how long after the first one of its files this
	// one began, by a clock that nobody sets.
	Recorder string        `json:"recorder,omitempty"`
	After    time.Duration `json:"after,omitempty"` // in nanoseconds
	Model    string        `json:"model,omitempty"` // that clients name
	// Share is the part of requests that is recorded, from 0 to 1. All turns of a conversation are, or none.
	Share  float64 `json:"share"`
	Policy Spec    `json:"policy"`
	DryRun bool    `json:"dryRun,omitempty"` // decisions were counted, and not followed
	// Arch is the architecture, as runtime.GOARCH has it: some add products of floating point numbers with another last
	// digit.
	Arch string `json:"arch"`
}

// Spec is a policy in words and numbers. The zero Spec is decide.Always.
type Spec struct {
	Mode            string        `json:"mode"`                      // always, never, threshold or predicted
	MinPromptTokens int           `json:"minPromptTokens,omitempty"` // of threshold and predicted
	UncachedTokens  int           `json:"uncachedTokens,omitempty"`  // the same
	TTFT            time.Duration `json:"ttft,omitempty"`            // of predicted, in nanoseconds; 0: the default
	ITL             time.Duration `json:"itl,omitempty"`             // the same
}

// Policy makes the policy. The error names a mode that is not known.
func (s *Spec) Policy() (decide.Policy, error) {
	threshold := decide.Threshold(s.UncachedTokens, s.MinPromptTokens)
	switch s.Mode {
	case "", "always":
		return decide.Always(), nil
	case "never":
		return decide.Never(), nil
	case "threshold":
		return threshold, nil
	case "predicted":
		return decide.Chain(threshold, decide.Predicted(decide.PredictedOptions{TTFT: s.TTFT, ITL: s.ITL})), nil
	}
	return nil, fmt.Errorf("the mode %.20q is not known", s.Mode)
}

// Entry is one recorded decision, with what it was decided on and what came of it.
type Entry struct {
	Header *Header       // of its file
	Line   int           // of what was read; 1 is the first header
	At     time.Duration // since Header.Began; below 0: decided before the file began
	decide.Recorded
	Prefixes []Prefix // of the prompt, the shortest first
}

// Prefix is a beginning of a prompt. Two prompts whose prefixes have the same Hash begin with the same bytes. Chance
// makes two beginnings alike once in 2^40 for the shortest ones, and once in 2^24 for longer ones that have the next
// shorter one in common. Hashes of two recorders have different keys, and cannot be compared.
type Prefix struct {
	Hash   uint64
	Tokens int // an estimate: the prompt's tokens by the prefix's share of its bytes
}
