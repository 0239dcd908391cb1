// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"encoding/json"
	"errors"
	"net"
	"slices"
	"strconv"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/internal/lmcacheconf"
)

// Options are the connector's settings.
type Options struct {
	// the address at which the gateway listens for notices, host:port; default 127.0.0.1:8500
	NotifyListen string `json:"notifyListen"`
	// how long the gateway waits for notices after P's response; default 10s
	NotifyTimeout *config.Duration `json:"notifyTimeout"`
	// how many of P's ranks send a notice for each request; default 0: as many as D has receiver ports
	Notifications int  `json:"notifications"`
	RetFirstToken bool `json:"retFirstTok"` // the first token is P's

	// Engine are LMCache's own settings under its own names: those of its file (pd_buffer_size, lmcache.pd_buffer_size,
	// and the old enable_nixl, nixl_role, nixl_peer_host, nixl_peer_port, nixl_buffer_size) and those of vLLM's
	// kv_connector_extra_config. In JSON they stand beside the other settings. pd_peer_init_port and pd_peer_alloc_port
	// also apply to decode engines without such attributes.
	Engine map[string]json.RawMessage `json:"-"`

	initPorts, allocPorts []int
}

func (o *Options) check() (lmcacheconf.Config, error) {
	engine, err := lmcacheconf.Read(o.Engine, true)
	errs := []error{err}
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	if o.NotifyListen != "" {
		_, port, err := net.SplitHostPort(o.NotifyListen)
		if n, perr := strconv.Atoi(port); err != nil || perr != nil || n < 0 || n > 65535 {
			fault("notifyListen", "is not host:port", "like 0.0.0.0:8500")
		}
	}
	if o.NotifyTimeout != nil && *o.NotifyTimeout <= 0 {
		fault("notifyTimeout", "is not above 0", "a notice that is lost is told by nothing else; 10s")
	}
	if o.Notifications < 0 || o.Notifications > maxNotifications {
		fault("notifications", "is out of range",
			"1 to "+strconv.Itoa(maxNotifications)+", or 0 for as many as D has receiver ports")
	}
	checkEngine(&engine, fault)
	o.initPorts, o.allocPorts = engine.Ints("pd_peer_init_port"), engine.Ints("pd_peer_alloc_port")
	if o.allocPorts == nil && engine.OnePort() {
		for _, port := range o.initPorts {
			o.allocPorts = append(o.allocPorts, port+AllocAbove)
		}
		if slices.Max(o.allocPorts) > 65535 {
			fault("pd_peer_alloc_port", "is missing",
				"the receivers' port for allocations, which was none of its own when there was a "+"nixl_peer_port")
		}
	}
	return engine, errors.Join(errs...)
}

// AllocAbove is the distance from a receiver's init port to its alloc port in LMCache's own examples
// (examples/disagg_prefill/1p1d/configs).
const AllocAbove = 100

// maxNotifications is more than the ranks of any engine.
const maxNotifications = 4096

// checkEngine refuses engines' settings with which this protocol cannot work.
func checkEngine(engine *lmcacheconf.Config, fault func(path, problem, remedy string)) {
	for _, e := range engine.File {
		switch e.Key {
		case "enable_pd":
			if !engine.Bool(e.Key) {
				fault(e.Path, "is false, with which P pushes nothing", "true, or type: lmcache for a shared store")
			}
		case "pd_skip_proxy_notification":
			if engine.Bool(e.Key) {
				fault(e.Path, "is true, so that no notice would ever come",
					"leave it out: D must not be asked before its KV is there")
			}
		case "pd_role":
			if !slices.Contains([]string{"sender", "receiver", "both"}, engine.Text(e.Key)) {
				fault(e.Path, "is not a known value", "one of sender, receiver, both")
			}
		case "pd_backend_mode":
			if !slices.Contains([]string{"sync", "async"}, engine.Text(e.Key)) {
				fault(e.Path, "is not a known value", "sync or async")
			}
		case "enable_p2p":
			if engine.Bool(e.Key) {
				fault(e.Path, "is true, which LMCache refuses together with enable_pd", "leave it out")
			}
		case "pd_peer_init_port", "pd_peer_alloc_port", "pd_proxy_port":
			for _, port := range engine.Ints(e.Key) {
				if port < 1 || port > 65535 {
					fault(e.Path, "is not a port", "1 to 65535")
					break
				}
			}
		}
	}
}
