// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"fmt"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/extproc"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

// One flow serves every model, over one pair of engines. A gateway would use package pick and a discovery.Set.
func ExampleNewServer() {
	p, err := discovery.New("http://127.0.0.1:8100", discovery.RolePrefill)
	if err != nil {
		fmt.Println(err)
		return
	}
	d, err := discovery.New("http://127.0.0.1:8200", discovery.RoleDecode)
	if err != nil {
		fmt.Println(err)
		return
	}
	conn, err := nixl.New(nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	flow, err := pdflow.New(conn, picked(pdflow.Pick{Prefill: p, Decode: d}))
	if err != nil {
		fmt.Println(err)
		return
	}
	server, err := extproc.NewServer(func(string) *pdflow.Flow { return flow }, transport.New(nil), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	g := grpc.NewServer(grpc.MaxRecvMsgSize(64 << 20)) // above Envoy's per_connection_buffer_limit_bytes
	extprocv3.RegisterExternalProcessorServer(g, server)
	for name := range g.GetServiceInfo() {
		fmt.Println(name) // then: g.Serve(listener)
	}
	// Output:
	// envoy.service.ext_proc.v3.ExternalProcessor
}
