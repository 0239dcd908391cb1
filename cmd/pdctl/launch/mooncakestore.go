// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"encoding/json"
	"net"
	"net/url"

	"strconv"

	"github.com/pdkit/pdkit/config"
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
	s := Settings{
		Engine:     "vllm",
		KVTransfer: &KVTransfer{Connector: "MooncakeStoreConnector", Role: "kv_both", Extra: o.extra()},
		Args:       []string{"--enable-prompt-tokens-details"},
		Env: []EnvVar{{Name: "PYTHONHASHSEED", Value: "0"},
			{Name: "MOONCAKE_CONFIG_PATH", Value: storeConfig}},
	}
	if KVRole(t.Endpoint.Role) == "kv_consumer" {
		s.KVTransfer.Role = "kv_consumer"
	}
	if o.LocalHostname != "" {
		s.Env = append(s.Env, EnvVar{Name: "MOONCAKE_REQUESTER_LOCAL_HOSTNAME", Value: o.LocalHostname})
	}
	if o.PreferredSegment != "" {
		s.Env = append(s.Env, EnvVar{Name: "MOONCAKE_PREFERRED_SEGMENT", Value: o.PreferredSegment})
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
	s.Notes = o.notes(t)
	return s, nil
}

func (o storeOptions) extra() map[string]any {
	extra := map[string]any{}
	for _, m := range []struct {
		key   string
		value any
		given bool
	}{
		{"load_async", o.LoadAsync, o.LoadAsync != nil},
		{"lookup_async", o.LookupAsync, o.LookupAsync != nil},
		{"lookup_rpc_port", o.LookupRPCPort, o.LookupRPCPort != 0},
		{"cache_prefix", o.CachePrefix, o.CachePrefix != ""},
		{"save_decode_cache", o.SaveDecodeCache, o.SaveDecodeCache != nil},
		{"store_tp_size", o.StoreTPSize, o.StoreTPSize != 0},
		{"enable_store_tp_lcm", o.EnableStoreTPLCM, o.EnableStoreTPLCM != nil},
		{"prefill_tp_sizes", o.PrefillTPSizes, len(o.PrefillTPSizes) > 0},
	} {
		if m.given {
			extra[m.key] = m.value
		}
	}
	if len(extra) == 0 {
		return nil
	}
	return extra
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
			return f, &config.FieldError{Path: "resources.maxMemory", Problem: "is not an amount of memory",
				Remedy: `write a quantity above 0, like "8Gi"`}
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

func (o storeOptions) notes(t Target) []Note {
	var notes []Note
	add := func(given bool, path, text string) {
		if given {
			notes = append(notes, Note{Path: path, Text: text})
		}
	}
	host, _, _ := net.SplitHostPort(cmp.Or(o.MasterServerAddress, defaultMaster))
	add(loopback(host) && !oneHost(t), "config.master_server_address",
		"is a loopback address, but the engines are on several hosts: name the host that mooncake_master runs on")
	add(o.SettleTime > 0, "config.settleTime", "the gateway waits that long between the legs; no setting of an engine")
	add(o.Mode == standalone, "config.mode",
		"needs a mooncake_client beside the engines, which owns the pool; its memory and disk are its own settings")
	add(o.EnableOffload && o.Mode != standalone, "config.enable_offload",
		"is most commonly used with mode standalone-store, whose mooncake_client needs --enable_offload=true too")
	add(o.TenantID != "" && o.TenantID != "default", "config.tenant_id",
		"the master also needs a quota policy that names each tenant")
	r := t.Resources
	if r.MaxMemory != "" && (o.GlobalSegmentSize != "" || o.Mode == standalone) {
		notes = append(notes,
			NoEffect("resources.maxMemory",
				"global_segment_size, or the mode standalone-store, says what each rank gives to the pool"))
	} else {
		add(r.MaxMemory != "", "resources.maxMemory", "global_segment_size: of each rank, not of all together")
	}
	r.MaxMemory = ""
	return append(notes,
		NoLimits(r, "the engines have no such limit; a disk's is MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES of "+
			"mooncake_client")...)
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
