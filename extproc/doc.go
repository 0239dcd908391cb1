// SPDX-License-Identifier: Apache-2.0

// Package extproc lets an Envoy send the decode leg of requests that two engines serve.
//
// It is a server for Envoy's external processing filter (ext_proc). Envoy sends it each request. A [Server] picks the
// pair, sends the prefill leg itself, and answers Envoy with the decode leg: its body, its headers, and the engine's
// address in the header x-gateway-destination-endpoint. Envoy sends that leg and passes the response to the client; no
// token goes through the server.
//
//	server, err := extproc.NewServer(func(string) *pdflow.Flow { return flow }, transport.New(nil), nil)
//	g := grpc.NewServer(grpc.MaxRecvMsgSize(40 << 20))
//	extprocv3.RegisterExternalProcessorServer(g, server)
//
// Envoy's configuration is in testdata/envoy.yaml; README.md says what each of its lines is for, and what an Envoy
// cannot do that pdflow.Flow.ServeHTTP does.
package extproc
