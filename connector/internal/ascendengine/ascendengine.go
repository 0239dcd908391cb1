// SPDX-License-Identifier: Apache-2.0

// Package ascendengine renders what the launch settings of vllm-ascend's two Mooncake connectors have in common.
//
// Facts: vllm-ascend at 182b75e (2026-08-22): docs/source/tutorials/features/pd_disaggregation_mooncake_multi_node.md,
// and mooncake_connector.py (_get_prefill_decode_size, which asserts both sizes of both roles; side_channel_port);
// before 0.11 examples/disaggregated_prefill_v1/mooncake_connector_deployment_guide.md.
package ascendengine

import (
	"strconv"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// The attributes of an engine that launch settings need.
const (
	AttrKVPort = "kvPort" // the first of the engine's kv ports; each rank has one
	AttrTPSize = attr.TPSize
	AttrDPSize = "dpSize"
)

// FailureStop is the stop_reason with which D ends a response under recompute_scheduler_enable that it gives up.
const FailureStop = "recomputed"

// portStep is the distance between the kv ports of two engines, as in the tutorial. maxSize bounds the sizes.
const (
	portStep = 100
	maxSize  = 1 << 12
)

// Sizes are an engine's tensor- and data-parallel sizes.
type Sizes struct{ TP, DP int }

// SizesOf reads an engine's sizes. The default of each is 1.
func SizesOf(e discovery.Endpoint) (s Sizes, err error) {
	if s.TP, err = attr.Int(e, AttrTPSize, 1, 1, maxSize); err == nil {
		s.DP, err = attr.Int(e, AttrDPSize, 1, 1, maxSize)
	}
	return s, err
}

// CheckEndpoint checks the attributes of this package.
func CheckEndpoint(e discovery.Endpoint) error {
	for _, a := range []struct {
		name string
		high int
	}{{AttrKVPort, 65535}, {AttrTPSize, maxSize}, {AttrDPSize, maxSize}} {
		if _, err := attr.Int(e, a.name, 1, 1, a.high); err != nil {
			return &config.FieldError{Path: "attributes." + a.name,
				Problem: "is not a number from 1 to " + strconv.Itoa(a.high),
				Remedy:  "only launch settings need it; remove it where they are not rendered"}
		}
	}
	return nil
}

// Settings renders an engine of a class. kvPort is the first kv port of all engines. The error is an
// *[connector.EndpointError], or a *[config.FieldError] if the engine's role is both.
func Settings(t launch.Target, class string, kvPort int) (launch.Settings, error) {
	out := launch.Settings{Engine: "vllm", Args: []string{"--enable-prompt-tokens-details"}}
	if t.Endpoint.Role.Has(discovery.RoleBoth) {
		return out, &config.FieldError{Path: "role",
			Problem: "is both, and an engine with vllm-ascend's connectors either sends or receives",
			Remedy:  "write prefill or decode; a decode engine serves requests alone, too"}
	}
	own, err := SizesOf(t.Endpoint)
	if err != nil {
		return out, err
	}
	for _, n := range []struct {
		flag  string
		value int
	}{{"--tensor-parallel-size", own.TP}, {"--data-parallel-size", own.DP}} {
		if n.value > 1 {
			out.Args = append(out.Args, n.flag, strconv.Itoa(n.value))
		}
	}
	if t.CPU {
		out.Notes = append(out.Notes, launch.Note{Path: "cpu",
			Text: "vllm-ascend needs Ascend NPUs: these settings are for them"})
	}
	out.Notes = append(out.Notes, launch.NoLimits(t.Resources,
		"Mooncake moves KV from one engine's memory to the other's; --gpu-memory-utilization sizes that")...)
	p, d, err := bothSizes(t)
	if err != nil {
		return out, err
	}
	port, err := portOf(t, kvPort)
	if err != nil {
		return out, err
	}
	out.KVTransfer = &launch.KVTransfer{Connector: class, Role: launch.KVRole(t.Endpoint.Role), Port: port}
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
	if out.KVTransfer.Role == "kv_consumer" {
		out.Notes = append(out.Notes, launch.Note{Path: "additional-config",
			Text: "leave recompute_scheduler_enable off: a response that ends as recomputed is a failed one"})
	}
	return out, nil
}

// TPRule is the rule for the tensor-parallel sizes of a pair: P's is a multiple of D's. One setting holds the sizes of
// both roles, so all engines of a role have the same size
// (docs/source/developer_guide/Design_Documents/disaggregated_prefill.md, Limitations).
func TPRule() connector.PairRule { return attr.PrefillMultiple(AttrTPSize) }

// bothSizes are the sizes of all prefill and of all decode engines. There is one setting for each role, so all engines
// of a role must have the same sizes, and the two roles' sizes must satisfy [TPRule].
func bothSizes(t launch.Target) (p, d Sizes, err error) {
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
		s, err := SizesOf(e)
		switch {
		case err != nil:
			return p, d, err
		case *into == Sizes{}:
			*into = s
		case into.TP != s.TP:
			return p, d, &connector.EndpointError{Endpoint: e.ID, Attribute: AttrTPSize,
				Problem: "is not that of the other engines of its role"}
		case into.DP != s.DP:
			return p, d, &connector.EndpointError{Endpoint: e.ID, Attribute: AttrDPSize,
				Problem: "is not that of the other engines of its role"}
		}
	}
	for _, s := range []*Sizes{&p, &d} {
		if *s == (Sizes{}) {
			*s = Sizes{1, 1}
		}
	}
	if !TPRule().Compatible(strconv.Itoa(p.TP), strconv.Itoa(d.TP)) {
		return p, d, &connector.EndpointError{Endpoint: t.Endpoint.ID, Attribute: AttrTPSize,
			Problem: "does not fit: that of prefill must be a multiple of that of decode"}
	}
	return p, d, nil
}

// portOf is the engine's kv port: its attribute, or one that no other engine of the model has.
func portOf(t launch.Target, first int) (int, error) {
	at := t.Index
	if t.Endpoint.Role.Has(discovery.RoleDecode) {
		at += 50 // so that a decode engine's port differs from a prefill engine's if Engines does not list them
	}
	for i, e := range t.Engines {
		if e.ID == t.Endpoint.ID && e.ID != "" {
			at = i
		}
	}
	return attr.Port(t.Endpoint, AttrKVPort, (first-1+portStep*at)%65535+1)
}
