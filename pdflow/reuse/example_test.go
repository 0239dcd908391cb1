// SPDX-License-Identifier: Apache-2.0

package reuse_test

import (
	"context"
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// Whether D takes over what P has computed, by the engines' own counters.
func ExampleVerify() {
	prefill, decode, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer prefill.Close()
	defer decode.Close()
	p, _ := discovery.New(prefill.URL(), discovery.RolePrefill)
	d, _ := discovery.New(decode.URL(), discovery.RoleDecode)
	set, err := static.NewSet(p, d)
	if err != nil {
		log.Fatal(err)
	}

	conn, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	flow, err := pdflow.New(conn, pick.New(set, pick.RoundRobin()))
	if err != nil {
		log.Fatal(err)
	}
	report, err := reuse.Verify(context.Background(), reuse.Target{
		Ask: reuse.Flow(flow, nil), Connector: conn, Prefill: []string{prefill.URL()}, Decode: []string{decode.URL()},
	}, reuse.Options{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(report.Verdict, report.Reused == report.PromptTokens, "texts that differ:", report.Different)
	flow.Shutdown(context.Background())
	// Output:
	// reused true texts that differ: 0
}
