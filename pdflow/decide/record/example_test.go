// SPDX-License-Identifier: Apache-2.0

package record_test

import (
	"fmt"
	"io"
	"log"
	"os"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// A picker's decisions are recorded with the policy's settings, so that Verify can make the policy again.
func ExampleNew() {
	spec := record.Spec{Mode: "threshold", UncachedTokens: 1024}
	policy, err := spec.Policy()
	if err != nil {
		log.Fatal(err)
	}
	recorder := record.New(record.Options{
		Header: record.Header{Model: "m", Share: 0.1, Policy: spec},
		Open:   func() (io.WriteCloser, error) { return os.CreateTemp("", "*.jsonl") },
		Failed: func(err error) { log.Print(err) },
	})
	defer recorder.Close() // when the flow has ended
	inner := pick.New(discovery.NewSet(), pick.PrefixAffinity(), pick.WithCandidates())
	picker, err := decide.New(inner, policy, &decide.Options{Recorder: recorder})
	if err != nil {
		log.Fatal(err)
	}
	defer picker.Close()
	fmt.Println(recorder.Counts())
	// Output: 0 0
}

func ExampleVerify() {
	f, err := os.Open("testdata/decisions.jsonl")
	if err != nil {
		log.Fatal(err)
	}
	defer f.Close()
	report, err := record.Verify(f)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(report.Header.Policy.Mode, report.Read, report.Alike, report.First == nil)
	// Output: threshold 43 43 true
}
