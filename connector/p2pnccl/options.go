// SPDX-License-Identifier: Apache-2.0

package p2pnccl

import (
	"errors"
	"math"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/config"
)

// Options are the engines' launch settings, under the engine's own names, which pdctl renders. They do not change
// the legs.
type Options struct {
	// bytes, such as "8e9"; P's is 1e1 to 1e9, D's as large as its memory allows
	KVBufferSize config.Number `json:"kv_buffer_size"`
	// the port of each engine's ZeroMQ socket, if its zmqAddress has none
	KVPort config.Number `json:"kv_port"`
	KVIP   string        `json:"kv_ip"` // this connector does not read it: see VLLM_HOST_IP

	ProxyIP   string        `json:"proxy_ip"`   // where engines announce themselves by ZeroMQ; "" means nowhere
	ProxyPort config.Number `json:"proxy_port"` // 30001 in the engines' examples
	// the engine's HTTP port, as it announces it; default: its URL's port
	HTTPPort config.Number `json:"http_port"`

	SendType         string        `json:"send_type"`          // PUT_ASYNC (the engine's default), PUT, GET
	MemPoolSizeGB    config.Number `json:"mem_pool_size_gb"`   // host memory for what does not fit into the buffer
	NCCLNumChannels  config.Number `json:"nccl_num_channels"`  // "8" in the engines' examples
	SendWaitTimeout  config.Number `json:"send_wait_timeout"`  // reserved by the engine
	RecvStoreTimeout config.Number `json:"recv_store_timeout"` // reserved by the engine
}

func (o *Options) check() error {
	var errs []error
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	if types := []string{"PUT_ASYNC", "PUT", "GET"}; o.SendType != "" && !slices.Contains(types, o.SendType) {
		fault("send_type", "is not a known value", "one of "+strings.Join(types, ", "))
	}
	for _, p := range []struct {
		path string
		n    config.Number
	}{{"kv_port", o.KVPort}, {"proxy_port", o.ProxyPort}, {"http_port", o.HTTPPort}} {
		if p.n.Given && (p.n.Value != math.Trunc(p.n.Value) || p.n.Value < 1 || p.n.Value > 65535) {
			fault(p.path, "is not a port", "1 to 65535")
		}
	}
	for _, p := range []struct {
		path string
		n    config.Number
	}{
		{"kv_buffer_size", o.KVBufferSize}, {"mem_pool_size_gb", o.MemPoolSizeGB},
		{"nccl_num_channels", o.NCCLNumChannels},
		{"send_wait_timeout", o.SendWaitTimeout}, {"recv_store_timeout", o.RecvStoreTimeout},
	} {
		if p.n.Given && p.n.Value <= 0 {
			fault(p.path, "is not above 0", "leave it out for the engine's default")
		}
	}
	if o.ProxyIP == "" && o.ProxyPort.Given {
		fault("proxy_port", "is given without proxy_ip", "write both, or neither")
	}
	return errors.Join(errs...)
}
