// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"encoding/json"
	"net"
	"net/url"
	"strconv"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/mooncakestore"
)

const (
	storeConfig   = "mooncake.json"
	defaultMaster = "127.0.0.1:50051"
	peerToPeer    = "P2PHANDSHAKE" // no metadata server
	standalone    = "standalone-store"
)

// storeOptions are the settings of the connector, with what they mean for engines.
type storeOptions struct{ *mooncakestore.Options }

// storeFile is the file that MOONCAKE_CONFIG_PATH names (vllm/distributed/mooncake_store.py). Its first four members
// are required.
type storeFile struct {
	MetadataServer      string `json:"metadata_server"`
	MasterServerAddress string `json:"master_server_address"`
	Protocol            string `json:"protocol"`
	DeviceName          string `json:"device_name"`
	Mode                string `json:"mode,omitempty"`
	GlobalSegmentSize   any    `json:"global_segment_size,omitempty"`
	LocalBufferSize     any    `json:"local_buffer_size,omitempty"`
	EnableOffload       bool   `json:"enable_offload,omitempty"`
	TenantID            string `json:"tenant_id,omitempty"`
}

// renderMooncakeStore gives Mooncake's file, the master that runs beside the engines, and vLLM's settings for one
// engine. P puts and gets, so that it does not compute known prefixes again. D only gets, unless it saves what it
// decodes.
func renderMooncakeStore(_ connector.KVConnector, given *mooncakestore.Options, t Target) (Settings, error) {
	o := storeOptions{given}
	s := vllm(&KVTransfer{Connector: "MooncakeStoreConnector", Role: "kv_both", Extra: o.extra()})
	if KVRole(t.Endpoint.Role) == "kv_consumer" {
		s.KVTransfer.Role = "kv_consumer"
	}
	s.set("PYTHONHASHSEED", "0")
	s.set("MOONCAKE_CONFIG_PATH", storeConfig)
	if o.LocalHostname != "" {
		s.set("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", o.LocalHostname)
	}
	if o.PreferredSegment != "" {
		s.set("MOONCAKE_PREFERRED_SEGMENT", o.PreferredSegment)
	}
	file, err := o.file(t)
	if err != nil {
		return Settings{}, err
	}
	content, err := json.MarshalIndent(file, "", "  ")
	if err != nil {
		return Settings{}, err
	}
	s.Files = []File{{Name: storeConfig, Content: string(content) + "\n"}}
	s.Companions = []Companion{o.master()}
	o.notes(&s, t)
	return s, nil
}

func (o storeOptions) extra() map[string]any {
	return orNil(addMembers(map[string]any{}, []member{
		{"load_async", o.LoadAsync, o.LoadAsync != nil},
		{"lookup_async", o.LookupAsync, o.LookupAsync != nil},
		{"lookup_rpc_port", o.LookupRPCPort, o.LookupRPCPort != 0},
		{"cache_prefix", o.CachePrefix, o.CachePrefix != ""},
		{"save_decode_cache", o.SaveDecodeCache, o.SaveDecodeCache != nil},
		{"store_tp_size", o.StoreTPSize, o.StoreTPSize != 0},
		{"enable_store_tp_lcm", o.EnableStoreTPLCM, o.EnableStoreTPLCM != nil},
		{"prefill_tp_sizes", o.PrefillTPSizes, len(o.PrefillTPSizes) > 0},
	}))
}

func (o storeOptions) file(t Target) (storeFile, error) {
	f := storeFile{
		MetadataServer:      cmp.Or(o.MetadataServer, peerToPeer),
		MasterServerAddress: cmp.Or(o.MasterServerAddress, defaultMaster),
		Protocol:            cmp.Or(o.Protocol, "rdma"), DeviceName: o.DeviceName, Mode: o.Mode,
		EnableOffload: o.EnableOffload,
		TenantID:      o.TenantID,
	}
	if o.Protocol == "" && t.CPU {
		f.Protocol = "tcp"
	}
	switch {
	case o.Mode == standalone:
		f.GlobalSegmentSize = 0
	case o.GlobalSegmentSize != "":
		f.GlobalSegmentSize = storeSize(o.GlobalSegmentSize)
	case t.Resources.MaxMemory != "":
		n, err := t.Resources.MaxMemory.Bytes()
		if err != nil || n == 0 {
			return f, refuse("resources.maxMemory", "is not an amount of memory",
				`write a quantity above 0, like "8Gi"`)
		}
		f.GlobalSegmentSize = n
	}
	if o.LocalBufferSize != "" {
		f.LocalBufferSize = storeSize(o.LocalBufferSize)
	}
	return f, nil
}

// storeSize is a size as Mooncake's file has it: bytes as a number.
func storeSize(s mooncakestore.Size) any {
	if n, err := strconv.ParseUint(string(s), 10, 63); err == nil {
		return n
	}
	return string(s)
}

// master is the process that knows where each block is.
func (o storeOptions) master() Companion {
	_, port, _ := net.SplitHostPort(cmp.Or(o.MasterServerAddress, defaultMaster))
	command := []string{"mooncake_master", "--port", port}
	if u, err := url.Parse(o.MetadataServer); err == nil && (u.Scheme == "http" || u.Scheme == "https") {
		command = append(command, "--enable_http_metadata_server=true",
			"--http_metadata_server_port="+cmp.Or(u.Port(), "8080"))
	}
	if o.EnableOffload {
		command = append(command, "--enable_offload=true")
	}
	if o.TenantID != "" && o.TenantID != "default" {
		command = append(command, "--enable_multi_tenants=true")
	}
	return Companion{Name: "mooncake-master", Command: command}
}

func (o storeOptions) notes(s *Settings, t Target) {
	host, _, _ := net.SplitHostPort(cmp.Or(o.MasterServerAddress, defaultMaster))
	s.noteIf(loopback(host) && !oneHost(t), "config.master_server_address",
		"is a loopback address, but the engines are on several hosts: name the host that mooncake_master runs on")
	s.noteIf(o.SettleTime > 0, "config.settleTime", settleTime)
	s.noteIf(o.Mode == standalone, "config.mode",
		"needs a mooncake_client beside the engines, which owns the pool; its memory and disk are its own settings")
	s.noteIf(o.EnableOffload && o.Mode != standalone, "config.enable_offload",
		"is most commonly used with mode standalone-store, whose mooncake_client needs --enable_offload=true too")
	s.noteIf(o.TenantID != "" && o.TenantID != "default", "config.tenant_id",
		"the master also needs a quota policy that names each tenant")
	r := t.Resources
	elsewhere := o.GlobalSegmentSize != "" || o.Mode == standalone
	s.idleIf(r.MaxMemory != "" && elsewhere, "resources.maxMemory",
		"global_segment_size, or the mode standalone-store, says what each rank gives to the pool")
	s.noteIf(r.MaxMemory != "" && !elsewhere, "resources.maxMemory",
		"global_segment_size: of each rank, not of all together")
	r.MaxMemory = ""
	s.noLimits(r, "the engines have no such limit; a disk's is MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES of "+
		"mooncake_client")
}

// oneHost reports whether all engines run on one host.
func oneHost(t Target) bool {
	for _, e := range t.Engines {
		if e.Host() != t.Endpoint.Host() {
			return false
		}
	}
	return true
}
