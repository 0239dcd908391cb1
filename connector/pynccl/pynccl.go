// SPDX-License-Identifier: Apache-2.0

// Package pynccl is the connector "pynccl": PyNcclConnector of vLLM's V0 engine (0.6.4 to 0.10), with one prefill and
// one decode engine in one NCCL group.
//
// P puts each prompt's KV and last hidden state into a lookup buffer in its own memory, under the prompt's tokens. D
// asks for the tokens of each prompt that it gets. P drops what D has found, so it can be used once. The requests say
// nothing about it: P gets the request with a limit of one token, and then D gets the client's own request. In vLLM
// 0.6.4 and 0.7.0 D computed a prompt that was not in the buffer. Later releases wait until it is there: for ever, if P
// never computes it.
//
// Facts: vllm/distributed/kv_transfer/kv_connector/simple_connector.py and kv_lookup_buffer/simple_buffer.py before
// their removal (vllm#29705, 2025-12-04). It needs CUDA and an engine of 2025; golden cases only.
package pynccl

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
)

// Name is the name the connector is registered under.
const Name = "pynccl"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "PyNcclConnector")
}

// Options are the engines' launch settings, under the engine's own names, which pdctl renders. They do not change
// the legs.
type Options struct {
	KVBufferSize config.Number `json:"kv_buffer_size"` // bytes of P's lookup buffer; the engine's default is 1e9
	// where the engine of rank 0 opens the NCCL group; the engine's default is 127.0.0.1
	KVIP string `json:"kv_ip"`
	// the first of four ports that the group uses; the engine's default is 14579
	KVPort         config.Number `json:"kv_port"`
	KVParallelSize config.Number `json:"kv_parallel_size"` // 2: one P and one D
	KVRank         config.Number `json:"kv_rank"`          // rendered by role: 0 for P, 1 for D
	KVBufferDevice string        `json:"kv_buffer_device"` // cuda (the engine's default) or cpu
}

// Connector is the connector "pynccl". The zero value is ready.
type Connector struct{ opts Options }

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	var errs []error
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	if n := o.KVParallelSize; n.Given && n.Value != 2 {
		fault("kv_parallel_size", "is not 2", "this connector knows one prefill and one decode engine")
	}
	if n := o.KVRank; n.Given && n.Value != 0 && n.Value != 1 {
		fault("kv_rank", "is not a rank", "0 is the prefill engine, 1 the decode engine")
	}
	if n := o.KVPort; n.Given && (n.Value != float64(int(n.Value)) || n.Value < 1 || n.Value > 65535-3) {
		fault("kv_port", "is not a port with three more after it", "1 to 65532")
	}
	if n := o.KVBufferSize; n.Given && n.Value <= 0 {
		fault("kv_buffer_size", "is not above 0", "leave it out for the engine's default")
	}
	if d := o.KVBufferDevice; d != "" && d != "cuda" && d != "cpu" {
		fault("kv_buffer_device", "is not a known value", "one of cuda, cpu")
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return &Connector{opts: *o}, nil
}

// Traits declares the protocol. D can take the KV of a prompt once, but each of several choices would ask for it.
// Engines of different tensor-parallel sizes hang (vllm#14952).
func (*Connector) Traits() connector.Traits {
	return connector.Traits{Name: Name, PairRules: []attr.PairRule{attr.Same(attr.TPSize)}}
}

// Prefill adds nothing: the flow asks P for one token.
func (*Connector) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

// Decode sends the client's own request.
func (*Connector) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}
