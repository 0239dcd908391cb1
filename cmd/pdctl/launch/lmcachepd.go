// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"encoding/json"
	"net"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/lmcachepd"
	"github.com/pdkit/pdkit/discovery"
)

// defaultBuffer is the size of the transfer buffer in LMCache's own examples, in bytes.
const defaultBuffer = 1 << 30

// renderLMCachePD gives LMCache's file and vLLM's settings for one engine: a sender (prefill) or a receiver (decode).
// With LMCache's default backend an engine cannot be both, so for the role both it returns an error.
func renderLMCachePD(c *lmcachepd.Connector, t Target) (Settings, error) {
	o, engine := c.Settings()
	r := &lmcachePDEngine{c: c, o: &o, engine: engine, t: t}
	r.Settings = vllm(&KVTransfer{Connector: "LMCacheConnectorV1", Role: KVRole(t.Endpoint.Role),
		Extra: engine.ExtraConfig()})
	r.set("PYTHONHASHSEED", "0")
	r.set("UCX_TLS", map[bool]string{false: "cuda_ipc,cuda_copy,tcp", true: "tcp"}[t.CPU])
	role := map[discovery.Role]string{discovery.RolePrefill: "sender",
		discovery.RoleDecode: "receiver"}[t.Endpoint.Role]
	if role == "" {
		if engine.Text("pd_backend_mode") != "sync" {
			return r.Settings, &attr.Error{Endpoint: t.Endpoint.ID, Attribute: "role",
				Problem: "is neither prefill nor decode: LMCache's asynchronous backend knows only sender and receiver"}
		}
		role = "both"
	}
	if err := r.write(role); err != nil {
		return r.Settings, err
	}
	r.extraConfig(role)
	r.setSize("--tensor-parallel-size", r.ranks(role))
	r.keep("lmcache-pd-" + t.Endpoint.Role.String() + "-" + strconv.Itoa(t.Index) + ".yaml")
	// Which engine settings pdkit's own settings became.
	r.became(o.NotifyListen != "", "notifyListen", "the gateway's; its port is the senders' pd_proxy_port")
	r.became(o.NotifyTimeout != nil, "notifyTimeout", "the gateway's; LMCache's pd_allocation_timeout_sec follows it")
	r.became(o.Notifications != 0, "notifications", "the gateway's")
	r.became(o.RetFirstToken, "retFirstTok", "the gateway's; receivers get skip_last_n_tokens 1")
	return r.Settings, nil
}

// lmcachePDEngine builds one engine's settings.
type lmcachePDEngine struct {
	lmcacheOutput
	c      *lmcachepd.Connector
	o      *lmcachepd.Options
	engine lmcachepd.EngineConfig
	t      Target
}

// write writes LMCache's file in the form of its examples/disagg_prefill/1p1d/configs.
func (r *lmcachePDEngine) write(role string) error {
	f := &r.file
	f.Set("local_cpu", false)
	f.Set("save_unfull_chunk", true)
	f.Set("enable_pd", true)
	f.Set("transfer_channel", "nixl")
	f.Set("pd_role", role)
	if role != "receiver" {
		host, port := r.gateway()
		f.Set("pd_proxy_host", host)
		f.Set("pd_proxy_port", port)
	}
	if role != "sender" {
		host, initPorts, allocPorts, err := r.c.Receiver(r.t.Endpoint)
		if err != nil {
			return err
		}
		f.Set("pd_peer_host", host)
		f.Set("pd_peer_init_port", initPorts)
		f.Set("pd_peer_alloc_port", allocPorts)
	}
	size, err := r.bufferSize()
	if err != nil {
		return err
	}
	f.Set("pd_buffer_size", size)
	f.Set("pd_buffer_device", map[bool]string{false: "cuda", true: "cpu"}[r.t.CPU])
	timeout := lmcachepd.DefaultTimeout
	if d := r.o.NotifyTimeout; d != nil {
		timeout = time.Duration(*d)
	}
	f.Set("pd_allocation_timeout_sec", json.Number(strconv.FormatFloat(timeout.Seconds(), 'f', -1, 64)))
	f.Set("nixl_backends", []string{"UCX"})
	r.engineSettings(role)
	return nil
}

// ranks is how many tensor-parallel ranks the engine must have: a receiver has one for each of its ports, a sender one
// for each notice that the gateway waits for. It is 0 if a sender's number is not known.
func (r *lmcachePDEngine) ranks(role string) int {
	if role != "sender" {
		if _, ports, _, err := r.c.Receiver(r.t.Endpoint); err == nil {
			return len(ports)
		}
	}
	if r.o.Notifications > 0 {
		return 0 // with MLA one rank sends for all
	}
	n := 0
	for _, e := range r.t.Engines {
		if _, ports, _, err := r.c.Receiver(e); err == nil && e.Role.Has(discovery.RoleDecode) {
			n = max(n, len(ports))
		}
	}
	return n
}

// gateway is the address to which P's ranks send notices.
func (r *lmcachePDEngine) gateway() (host string, port int) {
	listenHost, listenPort, _ := net.SplitHostPort(cmp.Or(r.o.NotifyListen, lmcachepd.DefaultListen))
	port, _ = strconv.Atoi(listenPort)
	if r.t.Gateway != "" {
		return r.t.Gateway, port
	}
	host = cmp.Or(listenHost, "127.0.0.1")
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	_, given := r.engine.Get("pd_proxy_host")
	r.noteIf(!given && loopback(host) && !loopback(r.t.Endpoint.Host()), "", "pd_proxy_host is loopback, for the "+
		"gateway's host is not known: without notices every request ends with 504")
	return host, port
}

func (r *lmcachePDEngine) bufferSize() (int64, error) {
	size := int64(defaultBuffer)
	if q := r.t.Resources.MaxMemory; q != "" {
		n, err := q.Bytes()
		if err != nil || n < 1 {
			return 0, refuse("resources.maxMemory", "is no size for a buffer", "")
		}
		size = n
		r.note("resources.maxMemory", "LMCache's pd_buffer_size, in bytes")
	}
	r.noLimits(config.Resources{MaxDisk: r.t.Resources.MaxDisk, MaxBandwidth: r.t.Resources.MaxBandwidth},
		"LMCache has no such limit for transfers from engine to engine")
	return size, nil
}

// ofOneRole are settings that only one role reads. If they are given for all engines, the file of the other role leaves
// them out.
var ofOneRole = map[string]string{
	"pd_peer_host": "receiver", "pd_peer_init_port": "receiver", "pd_peer_alloc_port": "receiver",
	"pd_peer_query_port": "receiver",
	"pd_proxy_host":      "sender", "pd_proxy_port": "sender",
}

// engineSettings writes the configuration's settings under LMCache's own names, and old names under today's.
func (r *lmcachePDEngine) engineSettings(role string) {
	for _, e := range r.engine.File {
		switch {
		case e.Key == "enable_pd":
			r.became(true, e.Path, "LMCache's enable_pd")
		case e.Key == "pd_role":
			other := r.engine.Text(e.Key) != role
			r.noEffect(other, e.Path, "the engine's role decides, and makes it a "+role)
			r.became(!other, e.Path, "LMCache's pd_role")
		case ofOneRole[e.Key] != "" && role != "both" && ofOneRole[e.Key] != role:
			r.noEffect(true, e.Path, "only a "+ofOneRole[e.Key]+" has LMCache's "+e.Key)
		case (e.Key == "pd_peer_init_port" || e.Key == "pd_peer_alloc_port") && r.portsGiven(e.Key):
			r.noEffect(true, e.Path, "the endpoint's own attribute holds")
		case e.Key == "pd_peer_init_port" && r.engine.OnePort() && !r.portsGiven("pd_peer_alloc_port"):
			r.became(true, e.Path, "LMCache's pd_peer_init_port; its pd_peer_alloc_port, which is not given, is "+
				strconv.Itoa(lmcachepd.AllocAbove)+" above, as in LMCache's examples")
		case e.Key == "pd_peer_init_port", e.Key == "pd_peer_alloc_port":
			r.became(true, e.Path, "LMCache's "+e.Key)
		default:
			r.file.Set(e.Key, e.Value)
			r.became(true, e.Path, "LMCache's "+e.Key)
		}
	}
	for _, e := range r.engine.Gone {
		r.noEffect(true, e.Path, e.Key)
	}
}

func (r *lmcachePDEngine) portsGiven(key string) bool {
	name := map[string]string{"pd_peer_init_port": "receiverInitPorts", "pd_peer_alloc_port": "receiverAllocPorts"}[key]
	return r.t.Endpoint.Attribute(name) != ""
}

// extraConfig writes kv_connector_extra_config as LMCache's launchers do. The name of the RPC socket must differ
// between the engines of a machine.
//
// skip_last_n_tokens leaves the prompt's last token out of the lookup. With retFirstTok that token is P's own, and P
// has stored nothing of it. Without retFirstTok D looks for exactly the prompt that P has stored, and with one token
// less it would miss the last chunk.
func (r *lmcachePDEngine) extraConfig(role string) {
	extra := r.KVTransfer.Extra
	for _, e := range r.engine.Extra {
		r.became(true, e.Path, "kv_connector_extra_config")
	}
	defaults := map[string]any{
		"discard_partial_chunks": false,
		"lmcache_rpc_port": map[string]string{"sender": "producer", "receiver": "consumer",
			"both": "both"}[role] + strconv.Itoa(r.t.Index),
	}
	if role != "sender" && r.o.RetFirstToken {
		defaults["skip_last_n_tokens"] = 1
	}
	for key, value := range defaults {
		if _, given := extra[key]; !given {
			extra[key] = value
		}
	}
	r.became(extra["discard_partial_chunks"] == true, "discard_partial_chunks",
		"a prompt shorter than a chunk is then never pushed and never told of: its requests end with 504")
}
