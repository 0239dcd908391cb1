// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"math"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"cmp"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// defaultNIXLPort is vLLM's own VLLM_NIXL_SIDE_CHANNEL_PORT.
const defaultNIXLPort = 5600

// nixlEngine has the settings that differ between the connectors with NIXL.
type nixlEngine struct {
	class    string // NixlConnector or NixlPushConnector
	engineID string // "" lets the engine make a new id at each start
	lease    time.Duration
	port     int // of the first engine's side channel on each host; 0 is defaultNIXLPort
}

// settings renders what all vLLM engines with NIXL have in common: the side channel's address, the lease, the roles.
// The error is an *[attr.Error].
//
// Facts: vLLM 0.32.0's vllm/config/kv_transfer.py and vllm/envs.py; kv_lease_duration took the place of
// VLLM_NIXL_ABORT_REQUEST_TIMEOUT in 0.22 (vllm#41383).
func (n nixlEngine) settings(t Target) (Settings, error) {
	port, err := sideChannelPort(t, cmp.Or(n.port, defaultNIXLPort))
	if err != nil {
		return Settings{}, err
	}
	host := sideChannelHost(t.Endpoint)
	transfer := &KVTransfer{Connector: n.class, Role: KVRole(t.Endpoint.Role),
		EngineID: n.engineID, Extra: map[string]any{}}
	s := Settings{Engine: "vllm", KVTransfer: transfer, Args: []string{"--enable-prompt-tokens-details"}}
	s.Env = []EnvVar{
		{Name: "VLLM_NIXL_SIDE_CHANNEL_HOST", Value: host},
		{Name: "VLLM_NIXL_SIDE_CHANNEL_PORT", Value: strconv.Itoa(port)},
		{Name: "PYTHONHASHSEED", Value: "0"},
	}
	if t.CPU {
		transfer.BufferDevice = "cpu"
	}
	if !t.Version.Before(0, 12) {
		transfer.LoadFailurePolicy = "fail" // the default since 2026-02 (vllm#34896); the failure tables rely on it
	}
	// Both settings take whole seconds. Rounding up keeps the engine's lease at least as long as the gateway's.
	seconds := int64(math.Ceil(n.lease.Seconds()))
	if t.Version.Before(0, 22) {
		s.Env = append(
			s.Env, EnvVar{Name: "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", Value: strconv.FormatInt(seconds, 10)},
		)
	} else {
		transfer.Extra["kv_lease_duration"] = seconds
	}
	if transfer.Role == "kv_both" {
		s.Notes = append(s.Notes, Note{Path: "role",
			Text: "kv_both is deprecated for NIXL in vLLM; engines of role prefill and decode get kv_producer and " +
				"kv_consumer"})
	}
	if loopback(host) {
		s.Notes = append(s.Notes, Note{Path: "sideChannelHost",
			Text: "the side channel's host goes into every handoff: a loopback address works only if all engines are " +
				"on one machine"})
	}
	s.Notes = append(s.Notes, nixlResources(t.Resources)...)
	return s, nil
}

// loopbackDevice is UCX's device for an engine on a CPU whose peers are on the same machine, as in the measured pairs.
// For others it is "", and UCX chooses the device.
func loopbackDevice(t Target) string {
	if ip, err := netip.ParseAddr(sideChannelHost(t.Endpoint)); t.CPU && err == nil && ip.IsLoopback() {
		return "lo"
	}
	return ""
}

// sideChannelHost is the address at which other engines reach an engine's side channel.
func sideChannelHost(e discovery.Endpoint) string {
	if h := strings.TrimSpace(e.Attribute("sideChannelHost")); h != "" {
		return h
	}
	return e.Host()
}

// sideChannelPort chooses the first port of a side channel: the attribute's, or the next free one on the engine's host.
// A data-parallel engine needs one port for each rank.
func sideChannelPort(t Target, first int) (int, error) {
	given, _, err := wanted(t.Endpoint)
	if err != nil || given != 0 {
		return given, err
	}
	taken, before := neighbours(t)
	if len(before) == 0 {
		return first + t.Index, nil // t.Engines does not list this engine
	}
	at := first
	for i, ranks := range before {
		if i > 0 {
			at += before[i-1]
		}
		at = skip(at, ranks, taken)
	}
	if at > 65535 {
		return 0, &attr.Error{Endpoint: t.Endpoint.ID, Attribute: "sideChannelPort",
			Problem: "is missing, and no port above the configured one is left"}
	}
	return at, nil
}

// span is a range of ports: from is in it, to is not.
type span struct{ from, to int }

// neighbours looks at the entries on the target's host. taken are the ports that entries fix. before has one number for
// each entry without a port, up to the target itself: how many ports it needs.
func neighbours(t Target) (taken []span, before []int) {
	passed := false
	for _, e := range t.Engines {
		port, ranks, err := wanted(e)
		if err != nil || sideChannelHost(e) != sideChannelHost(t.Endpoint) {
			continue // a faulty entry is reported when its own engine is rendered
		}
		if port != 0 {
			taken = append(taken, span{port, port + ranks})
		} else if !passed {
			before = append(before, ranks)
		}
		passed = passed || e.ID == t.Endpoint.ID
	}
	if !passed {
		return nil, nil
	}
	return taken, before
}

// skip moves a run of n ports up until none of them is taken.
func skip(at, n int, taken []span) int {
	for i := 0; i < len(taken); i++ {
		if s := taken[i]; at < s.to && s.from < at+n {
			at, i = s.to, -1
		}
	}
	return at
}

// wanted returns the port that an engine's entry fixes, or 0, and how many ports the engine needs from there on.
func wanted(e discovery.Endpoint) (port, ranks int, err error) {
	if port, err = attr.Int(e, "sideChannelPort", 0, 1, 65535); err != nil {
		return 0, 0, err
	}
	ranks, err = attr.Int(e, "dpSize", 1, 1, 65535)
	return port, ranks, err
}

// nixlResources notes that NIXL has none of the limits in a Spec's resources: it moves blocks between the engines' own
// memories and keeps none.
func nixlResources(r config.Resources) []Note {
	var notes []Note
	for _, limit := range []struct {
		path, text string
		value      config.Quantity
	}{
		{"resources.maxMemory", "NIXL keeps no KV of its own: it lies in the engine's KV cache, " +
			"which --kv-cache-memory-bytes or --gpu-memory-utilization bounds", r.MaxMemory},
		{"resources.maxDisk", "NIXL writes nothing to disk", r.MaxDisk},
		{"resources.maxBandwidth", "neither vLLM nor UCX bounds the bandwidth of a transfer", r.MaxBandwidth},
	} {
		if limit.value != "" {
			notes = append(notes, Note{NoEffect: true, Path: limit.path, Text: limit.text})
		}
	}
	return notes
}
