// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/pynccl"
)

// errNCCL refuses an engine on a CPU.
var errNCCL = refuse("cpu", "NCCL needs CUDA devices", "use type nixl or sharedstorage")

// renderPyNccl gives each role its rank in the group of two. The zero version means 0.10, the last with a V0 engine.
func renderPyNccl(_ connector.KVConnector, o *pynccl.Options, t Target) (Settings, error) {
	v := t.Version
	if v != (Version{}) && (!v.Before(0, 11) || v.Before(0, 6)) {
		return Settings{}, refuse("version", "has no PyNcclConnector",
			"vLLM 0.6.4 to 0.10; newer engines have NixlConnector (type nixl)")
	}
	if t.CPU {
		return Settings{}, errNCCL
	}
	rank := 0
	kv := &KVTransfer{Connector: "PyNcclConnector", Role: KVRole(t.Endpoint.Role), ParallelSize: 2,
		BufferSize: o.KVBufferSize.Value, IP: o.KVIP, Port: int(o.KVPort.Value), BufferDevice: o.KVBufferDevice}
	switch kv.Role {
	case "kv_both":
		return Settings{}, refuse("role", "is both, and an engine is either rank 0 or rank 1",
			"write prefill or decode")
	case "kv_consumer":
		rank = 1
	}
	kv.Rank = &rank
	s := Settings{Engine: "vllm", KVTransfer: kv}
	if !v.Before(0, 8) {
		s.set("VLLM_USE_V1", "0") // since 0.8 the V1 engine is the default
	}
	s.noteIf(v == (Version{}), "version", "the connector is gone after vLLM 0.10: run that or an older one")
	s.noteIf(t.Index > 0, "endpoints",
		"a group has one prefill and one decode engine: give each pair a group and a kv_port of its own")
	s.noteIf(o.KVParallelSize.Given, "config.kv_parallel_size", "is always 2: one prefill and one decode engine")
	s.idleIf(o.KVRank.Given, "config.kv_rank", "the rank follows the role: 0 for prefill, 1 for decode")
	s.noteIf(o.KVIP == "", "config.kv_ip",
		"is not set: the engines use 127.0.0.1, and must then run on one machine")
	s.note("args.--enable-chunked-prefill",
		"must be off: only a prompt that is computed in one step is put into the buffer")
	s.note("args.--tensor-parallel-size", "must be equal on both engines: they hang otherwise (vllm#14952)")
	s.noLimits(t.Resources, "the engine has kv_buffer_size")
	return s, nil
}
