// SPDX-License-Identifier: Apache-2.0

package mooncakestore

import (
	"encoding/json"
	"errors"
	"net"
	"regexp"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
)

// Options are the connector's settings. SettleTime is pdkit's own. The others are the engines', under the engines'
// names: those of Mooncake's JSON file, and those of kv_connector_extra_config. They are rendered and do not change the
// legs.
type Options struct {
	// SettleTime is the wait between P's response and decode, since P's put is asynchronous. Default 0.
	SettleTime config.Duration `json:"settleTime"`

	// Of the file that MOONCAKE_CONFIG_PATH names.
	Mode string `json:"mode"` // embedded (default), standalone-store
	// P2PHANDSHAKE (default), http://HOST:8080/metadata, etcd://…, redis://…
	MetadataServer      string `json:"metadata_server"`
	MasterServerAddress string `json:"master_server_address"` // HOST:50051; default 127.0.0.1:50051
	Protocol            string `json:"protocol"`              // rdma (the engine's default), tcp
	DeviceName          string `json:"device_name"`
	// how much memory each rank gives to the pool; the engine's default is 4 GiB
	GlobalSegmentSize Size   `json:"global_segment_size"`
	LocalBufferSize   Size   `json:"local_buffer_size"` // the engine's default is 4 GiB
	EnableOffload     bool   `json:"enable_offload"`
	TenantID          string `json:"tenant_id"`
	LocalHostname     string `json:"local_hostname"`    // MOONCAKE_REQUESTER_LOCAL_HOSTNAME
	PreferredSegment  string `json:"preferred_segment"` // MOONCAKE_PREFERRED_SEGMENT

	// Of kv_connector_extra_config.
	LoadAsync        *bool  `json:"load_async"`
	LookupAsync      *bool  `json:"lookup_async"`
	LookupRPCPort    int    `json:"lookup_rpc_port"`
	CachePrefix      string `json:"cache_prefix"`
	SaveDecodeCache  *bool  `json:"save_decode_cache"`
	StoreTPSize      int    `json:"store_tp_size"`
	EnableStoreTPLCM *bool  `json:"enable_store_tp_lcm"`
	PrefillTPSizes   []int  `json:"prefill_tp_sizes"`
}

// Size is an amount of memory as Mooncake writes it: "80GB", "512MB", or a number of bytes. Its units are powers of
// 1024. It is "" if it was left out. It keeps its text, since the text is rendered.
type Size string

const sizeRemedy = `write a size as Mooncake does, like "80GB", "512MB" or 1073741824`

var sizeForm = regexp.MustCompile(`^(?i)[0-9]+(\.[0-9]+)?\s*(gb|mb|kb|b)?$`)

// UnmarshalJSON reads a string or a number of bytes. The error is a *[config.FieldError] without a path.
func (s *Size) UnmarshalJSON(raw []byte) error {
	text := string(raw)
	if text == "null" {
		return nil
	}
	if strings.HasPrefix(text, `"`) {
		if err := json.Unmarshal(raw, &text); err != nil {
			return &config.FieldError{Problem: "is not a size", Remedy: sizeRemedy}
		}
		text = strings.TrimSpace(text)
	} else if _, err := strconv.ParseUint(text, 10, 63); err != nil {
		return &config.FieldError{Problem: "is not a size", Remedy: sizeRemedy}
	}
	if len(text) > 32 || !sizeForm.MatchString(text) {
		return &config.FieldError{Problem: "is not a size", Remedy: sizeRemedy}
	}
	*s = Size(text)
	return nil
}

// zero reports whether the size is 0.
func (s Size) zero() bool { return s != "" && !strings.ContainsAny(string(s), "123456789") }

const modeEmbedded, modeStandalone = "embedded", "standalone-store"

func (o *Options) check() error {
	var errs []error
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	if o.SettleTime < 0 {
		fault("settleTime", "is negative", `a duration like "50ms", or 0`)
	}
	switch {
	case o.Mode != "" && o.Mode != modeEmbedded && o.Mode != modeStandalone:
		fault("mode", "is not a known mode", "embedded or standalone-store")
	case o.Mode == modeStandalone && o.GlobalSegmentSize != "" && !o.GlobalSegmentSize.zero():
		fault("global_segment_size", "is given, but in mode standalone-store the engines give no memory",
			"0, or mode embedded")
	case o.Mode != modeStandalone && o.GlobalSegmentSize.zero():
		fault("global_segment_size", "is 0, but in mode embedded the engines are the pool",
			"more than 0, or mode standalone-store")
	}
	if o.LocalBufferSize.zero() {
		fault("local_buffer_size", "is 0", "more than 0; the engine's default is 4 GiB")
	}
	if o.MasterServerAddress != "" {
		host, port, err := net.SplitHostPort(o.MasterServerAddress)
		if n, bad := strconv.ParseUint(port, 10, 16); err != nil || host == "" || bad != nil || n == 0 {
			fault("master_server_address", "is not HOST:PORT", "the address of mooncake_master, by default port 50051")
		}
	}
	if o.LookupRPCPort < 0 || o.LookupRPCPort > 65535 {
		fault("lookup_rpc_port", "is not a port", "0 to 65535")
	}
	if o.StoreTPSize < 0 {
		fault("store_tp_size", "is negative", "0 (each engine's own) or more")
	}
	for i, n := range o.PrefillTPSizes {
		if n < 1 {
			fault("prefill_tp_sizes["+strconv.Itoa(i)+"]", "is not a size", "1 or more")
		}
	}
	return errors.Join(errs...)
}
