// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"fmt"
	"net/http"
	"strings"
)

// Verdict is the result of [Verify] in one word.
type Verdict string

// The verdicts. Only Reused is good.
const (
	// decode took over at least half of the prompts' tokens, and every compared text was right
	Reused    Verdict = "reused"
	Partly    Verdict = "partly"     // decode took over less than half of the prompts' tokens
	NotReused Verdict = "not reused" // the responses are right, but both engines computed each prompt
	Wrong     Verdict = "wrong text" // a text differs from the text of one engine alone
	Failed    Verdict = "failed"     // not all synthetic probes got a response of status 200
)

// Reason is a likely cause, and what to do about it.
type Reason struct {
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"`
}

// Report is what [Verify] found. As JSON it has the fields below; ratios are yours to compute.
type Report struct {
	Connector    string  `json:"connector"`
	Model        string  `json:"model"` // of the target
	Verdict      Verdict `json:"verdict"`
	PromptTokens int64   `json:"promptTokens"` // of all synthetic probes with a good response
	Reused       int64   `json:"reused"`       // of these, the tokens that decode took over
	Bytes        int64   `json:"bytes"`        // of KV that moved, if an engine counts bytes; else 0
	Compared     int     `json:"compared"`     // how many texts were compared with one engine alone
	Different    int     `json:"different"`    // how many of these differ
	// the engines counted more than the synthetic probes, so other requests used them meanwhile
	Disturbed bool             `json:"disturbed"`
	Reasons   []Reason         `json:"reasons,omitempty"`
	Probes    []SyntheticProbe `json:"probes"`

	metrics    bool // decode counts where prompt tokens come from
	byResponse bool // a good response is the proof
	textNote   string
	evidence   delta
}

// Ratio returns the share of prompt tokens that decode took over, 0 to 1.
func (r *Report) Ratio() float64 {
	if r.PromptTokens == 0 {
		return 0
	}
	return float64(r.Reused) / float64(r.PromptTokens)
}

// String returns the report in a few lines.
func (r *Report) String() string {
	var b strings.Builder
	name := r.Connector
	if name == "" {
		name = "the connector"
	}
	fmt.Fprintf(&b, "%s: %s", name, r.Verdict)
	answered := 0
	for _, p := range r.Probes {
		if p.Status == http.StatusOK {
			answered++
		}
	}
	if r.PromptTokens > 0 {
		fmt.Fprintf(&b, ", %d of %d prompt tokens", r.Reused, r.PromptTokens)
		if r.Bytes > 0 {
			fmt.Fprintf(&b, ", moved %d bytes", r.Bytes)
		}
	}
	if r.Verdict == Reused && r.byResponse {
		b.WriteString(", since a decode engine of this protocol cannot compute a prompt itself")
	}
	fmt.Fprintf(&b, "\n  synthetic probes answered: %d of %d\n", answered, len(r.Probes))
	switch {
	case r.textNote != "":
		fmt.Fprintf(&b, "  texts: not compared, %s\n", r.textNote)
	case r.Compared == 0:
		b.WriteString("  texts: not compared with one engine alone\n")
	default:
		fmt.Fprintf(&b, "  texts equal to one engine alone: %d of %d\n", r.Compared-r.Different, r.Compared)
	}
	if r.Disturbed {
		b.WriteString("  other traffic was on these engines: the figures are not the synthetic probes' alone\n")
	}
	for _, why := range r.Reasons {
		fmt.Fprintf(&b, "  - %s\n", why.Text)
		if why.Remedy != "" {
			fmt.Fprintf(&b, "    %s\n", why.Remedy)
		}
	}
	return b.String()
}

func (d *delta) add(x delta) {
	if d.prefill == nil {
		d.prefill, d.decode = counts{}, counts{}
	}
	for _, s := range counted {
		d.prefill[s] += x.prefill[s]
		d.decode[s] += x.decode[s]
	}
}
