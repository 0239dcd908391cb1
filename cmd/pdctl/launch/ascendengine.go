// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"strconv"

	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// ascendPortStep is the distance between the kv ports of two engines, as in the tutorial. maxAscendSize bounds the
// sizes.
const (
	ascendPortStep = 100
	maxAscendSize  = 1 << 12
)

// ascendSizes are an engine's tensor- and data-parallel sizes.
type ascendSizes struct{ TP, DP int }

// ascendSizesOf reads an engine's sizes. The default of each is 1.
func ascendSizesOf(e discovery.Endpoint) (s ascendSizes, err error) {
	if s.TP, err = attr.Int(e, attr.TPSize, 1, 1, maxAscendSize); err == nil {
		s.DP, err = attr.Int(e, "dpSize", 1, 1, maxAscendSize)
	}
	return s, err
}

// ascendSettings renders what vllm-ascend's two Mooncake connectors have in common. kvPort is the first kv port of all
// engines. The error is an *[attr.Error], or a *[config.FieldError] if the engine's role is both.
//
// Facts: vllm-ascend at 182b75e (2026-08-22): docs/source/tutorials/features/pd_disaggregation_mooncake_multi_node.md,
// and mooncake_connector.py (_get_prefill_decode_size, which asserts both sizes of both roles; side_channel_port);
// before 0.11 examples/disaggregated_prefill_v1/mooncake_connector_deployment_guide.md.
func ascendSettings(t Target, class string, kvPort int) (Settings, error) {
	out := vllm(nil)
	if t.Endpoint.Role.Has(discovery.RoleBoth) {
		return out, refuseBoth("vllm-ascend's connectors either sends or receives")
	}
	own, err := ascendSizesOf(t.Endpoint)
	if err != nil {
		return out, err
	}
	out.setSize("--tensor-parallel-size", own.TP)
	out.setSize("--data-parallel-size", own.DP)
	out.noteIf(t.CPU, "cpu", "vllm-ascend needs Ascend NPUs: these settings are for them")
	out.noLimits(t.Resources,
		"Mooncake moves KV from one engine's memory to the other's; --gpu-memory-utilization sizes that")
	p, d, err := ascendBothSizes(t)
	if err != nil {
		return out, err
	}
	port, err := ascendPort(t, kvPort)
	if err != nil {
		return out, err
	}
	out.KVTransfer = &KVTransfer{Connector: class, Role: KVRole(t.Endpoint.Role), Port: port}
	out.KVTransfer.Extra = map[string]any{
		"prefill": map[string]any{"dp_size": p.DP, "tp_size": p.TP},
		"decode":  map[string]any{"dp_size": d.DP, "tp_size": d.TP},
	}
	if t.Version.Before(0, 11) {
		rank := 0
		if out.KVTransfer.Role == "kv_consumer" {
			rank = 1
		}
		out.KVTransfer.BufferDevice, out.KVTransfer.ParallelSize, out.KVTransfer.Rank = "npu", 1, &rank
	}
	out.noteIf(out.KVTransfer.Role == "kv_consumer", "additional-config",
		"leave recompute_scheduler_enable off: a response that ends as recomputed is a failed one")
	return out, nil
}

// ascendBothSizes are the sizes of all prefill and of all decode engines. There is one setting for each role, so all
// engines of a role must have the same sizes, and the two roles' sizes must satisfy attr.PrefillMultiple.
func ascendBothSizes(t Target) (p, d ascendSizes, err error) {
	for _, e := range append([]discovery.Endpoint{t.Endpoint}, t.Engines...) {
		into := &d
		switch {
		case e.Role.Has(discovery.RoleBoth):
			continue
		case e.Role.Has(discovery.RolePrefill):
			into = &p
		case !e.Role.Has(discovery.RoleDecode):
			continue
		}
		s, err := ascendSizesOf(e)
		switch {
		case err != nil:
			return p, d, err
		case *into == ascendSizes{}:
			*into = s
		case into.TP != s.TP:
			return p, d, &attr.Error{Endpoint: e.ID, Attribute: attr.TPSize,
				Problem: "is not that of the other engines of its role"}
		case into.DP != s.DP:
			return p, d, &attr.Error{Endpoint: e.ID, Attribute: "dpSize",
				Problem: "is not that of the other engines of its role"}
		}
	}
	for _, s := range []*ascendSizes{&p, &d} {
		if *s == (ascendSizes{}) {
			*s = ascendSizes{1, 1}
		}
	}
	if !attr.PrefillMultiple(attr.TPSize).Compatible(strconv.Itoa(p.TP), strconv.Itoa(d.TP)) {
		return p, d, &attr.Error{Endpoint: t.Endpoint.ID, Attribute: attr.TPSize,
			Problem: "does not fit: that of prefill must be a multiple of that of decode"}
	}
	return p, d, nil
}

// ascendPort is the engine's kv port: its attribute, or one that no other engine of the model has.
func ascendPort(t Target, first int) (int, error) {
	at := t.Index
	if t.Endpoint.Role.Has(discovery.RoleDecode) {
		at += 50 // so that a decode engine's port differs from a prefill engine's if Engines does not list them
	}
	for i, e := range t.Engines {
		if e.ID == t.Endpoint.ID && e.ID != "" {
			at = i
		}
	}
	return attr.Port(t.Endpoint, "kvPort", (first-1+ascendPortStep*at)%65535+1)
}
