// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/pynccl"
)

// renderPyNccl gives each role its rank in the group of two. The zero version means 0.10, the last with a V0 engine.
func renderPyNccl(_ connector.KVConnector, o *pynccl.Options, t Target) (Settings, error) {
	v := t.Version
	if v != (Version{}) && (!v.Before(0, 11) || v.Before(0, 6)) {
		return Settings{},
			&config.FieldError{Path: "version", Problem: "has no PyNcclConnector",
				Remedy: "vLLM 0.6.4 to 0.10; newer engines have NixlConnector (type nixl)"}
	}
	if t.CPU {
		return Settings{},
			&config.FieldError{Path: "cpu", Problem: "NCCL needs CUDA devices",
				Remedy: "use type nixl or sharedstorage"}
	}
	rank := 0
	kv := &KVTransfer{Connector: "PyNcclConnector", Role: KVRole(t.Endpoint.Role), ParallelSize: 2,
		BufferSize: o.KVBufferSize.Value, IP: o.KVIP, Port: int(o.KVPort.Value), BufferDevice: o.KVBufferDevice}
	switch kv.Role {
	case "kv_both":
		return Settings{},
			&config.FieldError{Path: "role", Problem: "is both, and an engine is either rank 0 or rank 1",
				Remedy: "write prefill or decode"}
	case "kv_consumer":
		rank = 1
	}
	kv.Rank = &rank
	s := Settings{Engine: "vllm", KVTransfer: kv}
	if v == (Version{}) || !v.Before(0, 8) {
		s.Env = append(s.Env, EnvVar{Name: "VLLM_USE_V1", Value: "0"}) // since 0.8 the V1 engine is the default
	}
	if v == (Version{}) {
		s.Notes = append(s.Notes,
			Note{Path: "version", Text: "the connector is gone after vLLM 0.10: run that or an older one"})
	}
	if t.Index > 0 {
		s.Notes = append(s.Notes,
			Note{Path: "endpoints",
				Text: "a group has one prefill and one decode engine: give each pair a group and a kv_port of its own"})
	}
	if o.KVParallelSize.Given {
		s.Notes = append(s.Notes,
			Note{Path: "config.kv_parallel_size", Text: "is always 2: one prefill and one decode engine"})
	}
	if o.KVRank.Given {
		s.Notes = append(s.Notes,
			NoEffect("config.kv_rank", "the rank follows the role: 0 for prefill, 1 for decode"))
	}
	if o.KVIP == "" {
		s.Notes = append(s.Notes,
			Note{Path: "config.kv_ip",
				Text: "is not set: the engines use 127.0.0.1, and must then run on one machine"})
	}
	s.Notes = append(s.Notes,
		Note{Path: "args.--enable-chunked-prefill",
			Text: "must be off: only a prompt that is computed in one step is put into the buffer"},
		Note{Path: "args.--tensor-parallel-size",
			Text: "must be equal on both engines: they hang otherwise (vllm#14952)"})
	s.Notes = append(s.Notes, NoLimits(t.Resources, "the engine has kv_buffer_size")...)
	return s, nil
}
