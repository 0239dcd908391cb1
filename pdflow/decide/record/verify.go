// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/pdkit/pdkit/pdflow/decide"
)

// Report says whether a policy decides as was recorded.
type Report struct {
	Header   Header
	Read     int // decisions
	Alike    int
	First    *Difference     // nil: there is none
	Problems map[Problem]int // lines that could not be read
}

// Difference is a decision that the policy decides otherwise.
type Difference struct {
	Entry *Entry
	Now   decide.Decision
}

// Verify evaluates each decision of a file with the policy that the file's header names, as the code at hand has it. Of
// files that were joined, the report has the first one's header. The error is that of [Read], or of a header's policy.
func Verify(from io.Reader) (*Report, error) {
	h, entries, err := Read(from)
	if err != nil {
		return nil, err
	}
	r := &Report{Header: h, Problems: map[Problem]int{}}
	var last *Header
	var policy decide.Policy
	for e, err := range entries {
		if bad, ok := errors.AsType[*LineError](err); ok {
			r.Problems[bad.Problem]++
			continue
		} else if err != nil {
			return r, err
		}
		if e.Header != last {
			if policy, err = e.Header.Policy.Policy(); err != nil {
				return nil, err
			}
			last = e.Header
		}
		r.Read++
		var now decide.Decision
		if policy.Decide(&e.Input, &now); now == e.Decision {
			r.Alike++
		} else if r.First == nil {
			r.First = &Difference{Entry: e, Now: now}
		}
	}
	return r, nil
}

// String says in words what was decided, and what is decided now.
func (d *Difference) String() string {
	e := d.Entry
	var b strings.Builder
	fmt.Fprintf(&b, "line %d, decided at %s on a prompt of %d tokens:\n", e.Line,
		e.Time.UTC().Format("2006-01-02T15:04:05.000Z"), e.Input.Prompt)
	fmt.Fprintf(&b, "  recorded: %s\n  now:      %s", e.words(&e.Decision), e.words(&d.Now))
	return b.String()
}

// words says what a decision is.
func (e *Entry) words(d *decide.Decision) string {
	engine := func(role, i int) string {
		if i < 0 || i >= len(e.Engines[role]) {
			return "any"
		}
		return e.Engines[role][i]
	}
	text := d.Action.String()
	switch d.Action {
	case decide.DecodeAlone:
		text += " at " + engine(1, d.Decode)
	case decide.PrefillAlone:
		text += " at " + engine(0, d.Prefill)
	case decide.Refuse:
		text += fmt.Sprintf(" for %s", d.RetryAfter)
	default:
		text += " between " + engine(0, d.Prefill) + " and " + engine(1, d.Decode)
	}
	if d.Reason != "" {
		text += ", " + d.Reason
	}
	if d.TTFT != 0 || d.ITL != 0 {
		text += fmt.Sprintf(", predicted TTFT %s and ITL %s", d.TTFT, d.ITL)
	}
	return text
}
