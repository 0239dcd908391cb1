// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"net"
	"strconv"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/moriio"
	"github.com/pdkit/pdkit/discovery"
)

// pingPort is the port to which engines announce themselves in vLLM's examples.
const pingPort = 36367

// renderMoRIIO gives vLLM's --kv-transfer-config. If the gateway's host is known, engines announce themselves there.
// With an empty proxy_ip they do not (moriio_connector.py then starts no ping), and the gateway must know them in
// another way.
func renderMoRIIO(k connector.KVConnector, o *moriio.Options, t Target) (Settings, error) {
	c, ok := connector.As[*moriio.Connector](k)
	if !ok {
		return Settings{}, ErrNoSettings
	}
	out := vllm(nil)
	own, err := c.Engine(t.Endpoint)
	if err != nil {
		return out, err
	}
	out.setSize("--tensor-parallel-size", own.TP)
	out.setSize("--data-parallel-size", own.DP)
	if own.Local < own.DP {
		out.Args = append(out.Args, "--data-parallel-size-local", strconv.Itoa(own.Local), "--data-parallel-hybrid-lb")
		out.note("attributes.dpSizeLocal", "each pod also needs --data-parallel-start-rank, the number of its first "+
			"rank, and --data-parallel-address, the first pod's")
	}
	out.noteIf(t.CPU, "cpu", "MoRIIO needs AMD GPUs with ROCm: these settings are for them")
	out.noLimits(t.Resources,
		"MoRIIO moves KV from one engine's memory to the other's; --gpu-memory-utilization sizes that")
	if t.Endpoint.Role.Has(discovery.RoleBoth) {
		out.note("role", "serves requests alone, and so runs without a KV connector: MoRIIOConnector takes every role "+
			"but kv_producer for a consumer, which serves none alone before vLLM 0.33 (with mode write 0.32)")
		return out, nil
	}
	port, err := strconv.Atoi(portOf(t.Endpoint))
	if err != nil {
		return out, err
	}
	extra := map[string]any{
		"proxy_ip": t.Gateway, "proxy_ping_port": 0, "http_port": port,
		"handshake_port": own.HandshakePort, "notify_port": own.NotifyPort, "read_mode": o.Mode == moriio.ModeRead,
		"defer_timeout": c.Traits().Handoff.Lease.Seconds(),
	}
	if net.ParseIP(own.Host) != nil {
		// otherwise the engine chooses an address, which its peer may not reach
		extra["host_ip"] = own.Host
	}
	if t.Gateway != "" {
		extra["proxy_ping_port"] = pingPort
		out.note("proxy_ping_port", "where spec.discovery.registration listens, if engines are to announce "+
			"themselves; otherwise make proxy_ip empty")
	}
	out.KVTransfer = &KVTransfer{Connector: "MoRIIOConnector", Role: KVRole(t.Endpoint.Role),
		Extra: extra}
	return out, nil
}
