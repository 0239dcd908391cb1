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
	Model   string    `json:"model,omitempty"` // that clients name
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

// Entry is one recorded decision.
type Entry struct {
	At       time.Duration   // since Header.Began
	Attempt  int             // of its request: above 1, it is a retry
	Engines  [2][]string     // IDs of Input.Prefill and Input.Decode, in their order
	Input    decide.Input    // exactly as the policy had it
	Decision decide.Decision // exactly as the policy gave it
	// Instead is why the decision was not followed: dry_run, doubtful, not_allowed or changed, as in the reasons of
	// pd_decisions_total. "": it was.
	Instead         string
	Prefill, Decode string // IDs of the engines that served; "": none. One that served alone is Decode
	Result          Result
	Prefixes        []Prefix // of the prompt, the shortest first
}

// Result is what came of a decision.
type Result struct {
	TTFT   time.Duration // from the decision to the first byte of a stream; 0: not known
	ITL    time.Duration // mean between two tokens of a stream; 0: not known
	Took   time.Duration // from the decision to the end
	Output int           // tokens; 0: not known
	Cached int           // tokens of the prompt that prefill found in its cache; 0: none, or not known
	Error  string        // the code of a failure, like decode_failed; overloaded: it was refused. "": it was served
}

// Prefix is a beginning of a prompt. Two prompts with the same Hash have the same beginning, as far as 24 bits tell for
// two that have the same next shorter one, and 40 bits for the shortest. Hashes of two recorders cannot be compared.
type Prefix struct {
	Hash   uint64 // of this beginning, and of all shorter ones
	Tokens int    // of it: an estimate, by its share of the prompt's bytes
}
