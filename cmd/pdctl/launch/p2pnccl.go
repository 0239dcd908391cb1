// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"net"
	"strconv"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/p2pnccl"
	"github.com/pdkit/pdkit/discovery"
)

// renderP2pNccl gives the role, the buffer, the address and the settings with which the engine announces itself. vLLM
// has the connector from 0.9.2 to 0.22. The zero version means the newest of these.
func renderP2pNccl(_ connector.KVConnector, o *p2pnccl.Options, t Target) (Settings, error) {
	if t.Endpoint.Role.Has(discovery.RoleBoth) {
		alone := Settings{Engine: "vllm"}
		alone.note("role", "serves requests alone, and so runs without a KV connector: with this one an engine either "+
			"sends or receives")
		return alone, nil
	}
	v := t.Version
	if v != (Version{}) && !v.Before(0, 23) || v.Before(0, 9) {
		return Settings{}, refuse("version", "has no P2pNcclConnector",
			"vLLM 0.9.2 to 0.22; newer engines have NixlConnector (type nixl)")
	}
	if t.CPU {
		return Settings{}, errNCCL
	}
	kv := &KVTransfer{Connector: "P2pNcclConnector", Role: KVRole(t.Endpoint.Role),
		BufferSize: o.KVBufferSize.Value, Port: int(o.KVPort.Value)}
	s := Settings{Engine: "vllm", KVTransfer: kv, Args: []string{"--no-enable-prefix-caching"}}
	s.idleIf(o.KVIP != "", "config.kv_ip",
		"the connector does not read it: it takes the machine's own address, or VLLM_HOST_IP")
	text, err := p2pnccl.AddressOf(t.Endpoint)
	if err == nil { // the engine's own entry overrides the settings
		host, port, _ := net.SplitHostPort(text)
		kv.Port, _ = strconv.Atoi(port)
		if net.ParseIP(host) != nil {
			s.set("VLLM_HOST_IP", host)
		}
		s.idleIf(o.KVPort.Given && kv.Port != int(o.KVPort.Value), "config.kv_port",
			"the engine's attribute zmqAddress names another port")
	}
	s.noteIf(err != nil, "attributes.zmqAddress", "is missing: pdkit must know the address and kv_port of this engine")
	kv.Extra = p2pNcclExtra(o, t.Endpoint)
	s.idleIf(o.HTTPPort.Given && o.ProxyIP == "", "config.http_port",
		"an engine announces it only where proxy_ip is set")
	if !v.Before(0, 14) {
		s.set("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
		s.note("env.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "must be 1 on both engines: from 0.14 on they add a "+
			"random suffix to the id that names the tensors, and D waits for ever")
	}
	s.noteIf(v == (Version{}), "version", "the connector is gone after vLLM 0.22: run that or an older one")
	s.note("args.--no-enable-prefix-caching",
		"what D has cached itself it would not take over, and P's tensors stay in its buffer")
	s.noLimits(t.Resources, "the engine has kv_buffer_size and mem_pool_size_gb")
	return s, nil
}

func p2pNcclExtra(o *p2pnccl.Options, e discovery.Endpoint) map[string]any {
	extra := map[string]any{}
	if o.ProxyIP != "" {
		// Without proxy_ip an engine announces itself to nobody and does not use http_port.
		extra["proxy_ip"] = o.ProxyIP
		extra["proxy_port"] = "30001"
		extra["http_port"] = portOf(e)
		if o.HTTPPort.Given {
			extra["http_port"] = o.HTTPPort.String()
		}
		if o.ProxyPort.Given {
			extra["proxy_port"] = o.ProxyPort.String()
		}
	}
	if o.SendType != "" {
		extra["send_type"] = o.SendType
	}
	for name, n := range map[string]config.Number{"mem_pool_size_gb": o.MemPoolSizeGB,
		"nccl_num_channels": o.NCCLNumChannels, "send_wait_timeout": o.SendWaitTimeout,
		"recv_store_timeout": o.RecvStoreTimeout} {
		if n.Given {
			extra[name] = n.String()
		}
	}
	return orNil(extra)
}
