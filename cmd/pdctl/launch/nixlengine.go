// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

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
	transfer := &KVTransfer{Connector: n.class, Role: KVRole(t.Endpoint.Role), EngineID: n.engineID,
		Extra: map[string]any{}}
	s := vllm(transfer)
	s.set("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
	s.set("VLLM_NIXL_SIDE_CHANNEL_PORT", strconv.Itoa(port))
	s.set("PYTHONHASHSEED", "0")
	if t.CPU {
		transfer.BufferDevice = "cpu"
	}
	if !t.Version.Before(0, 12) {
		transfer.LoadFailurePolicy = "fail" // the default since 2026-02 (vllm#34896); the failure tables rely on it
	}
	// Both settings take whole seconds. Rounding up keeps the engine's lease at least as long as the gateway's.
	seconds := int64(math.Ceil(n.lease.Seconds()))
	if t.Version.Before(0, 22) {
		s.set("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", strconv.FormatInt(seconds, 10))
	} else {
		transfer.Extra["kv_lease_duration"] = seconds
	}
	s.noteIf(transfer.Role == "kv_both", "role",
		"kv_both is deprecated for NIXL in vLLM; engines of role prefill and decode get kv_producer and kv_consumer")
	s.noteIf(loopback(host), "sideChannelHost",
		"the side channel's host goes into every handoff: a loopback address works only if all engines are on one "+
			"machine")
	// NIXL has no limits: it moves blocks between the engines' own memories and keeps none.
	s.idleIf(t.Resources.MaxMemory != "", "resources.maxMemory", "NIXL keeps no KV of its own: it lies in the "+
		"engine's KV cache, which --kv-cache-memory-bytes or --gpu-memory-utilization bounds")
	s.idleIf(t.Resources.MaxDisk != "", "resources.maxDisk", "NIXL writes nothing to disk")
	s.idleIf(t.Resources.MaxBandwidth != "", "resources.maxBandwidth",
		"neither vLLM nor UCX bounds the bandwidth of a transfer")
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
func sideChannelPort(t Target, first int) (int, error) {
	given, _, err := sideChannelPorts(t.Endpoint)
	if err != nil || given != 0 {
		return given, err
	}
	if !slices.ContainsFunc(t.Engines, func(e discovery.Endpoint) bool { return e.ID == t.Endpoint.ID }) {
		return first + t.Index, nil
	}
	if at := nextPort(t, first, sideChannelHost, sideChannelPorts); at != 0 {
		return at, nil
	}
	return 0, &attr.Error{Endpoint: t.Endpoint.ID, Attribute: "sideChannelPort",
		Problem: "is missing, and no port above the configured one is left"}
}

// sideChannelPorts returns the port that an engine's entry fixes, or 0, and how many ports the engine needs from there
// on: one for each data-parallel rank, up to the last one behind the engine's URL.
func sideChannelPorts(e discovery.Endpoint) (port, ranks int, err error) {
	if port, err = attr.Int(e, "sideChannelPort", 0, 1, 65535); err != nil {
		return 0, 0, err
	}
	of, err := attr.RanksOf(e)
	return port, of.Start + of.Local, err
}
