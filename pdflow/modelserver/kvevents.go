// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"net"
	"strconv"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery/kvevents"
)

// KVEvents subscribes to the KV-cache events of the engines, so that pickers know which engine holds which prompt: see
// packages kvevents and kvindex. A program that serves the flows runs it.
type KVEvents struct {
	Mode KVEventsMode `json:"mode"` // off, entries or ask
	// HOST:PORT where rank 0 of engines connects whose sockets do not bind; rank n connects n ports above
	Listen string `json:"listen"`
	Ranks  int    `json:"ranks"`  // ports from listen on; 0 is 1
	Tokens string `json:"tokens"` // engines asks them which tokens a prompt has, before the pick; off or "": nobody
	// how long a request waits for its tokens at most
	TokensTimeout config.Duration `json:"tokensTimeout"`
}

// KVEventsMode says which engines are subscribed to; "" is off.
type KVEventsMode string

// The modes of subscriptions.
const (
	KVEventsEntries KVEventsMode = "entries" // those whose entries have the attribute kvEvents, or kvEventsReplay
	KVEventsAsk     KVEventsMode = "ask"     // the others, too, where they say that they publish
)

// On reports whether engines are subscribed to.
func (m KVEventsMode) On() bool { return m == KVEventsEntries || m == KVEventsAsk }

// UnmarshalJSON reads a mode, and YAML's false.
func (m *KVEventsMode) UnmarshalJSON(raw []byte) error {
	switch string(raw) {
	case `"off"`, "false":
		*m = "off"
	case `"entries"`:
		*m = KVEventsEntries
	case `"ask"`:
		*m = KVEventsAsk
	default:
		return &config.FieldError{Problem: "is not a known mode", Remedy: "write off, entries or ask"}
	}
	return nil
}

func (m *ModelServer) checkKVEvents() {
	const at = "spec.kvEvents"
	k := m.Spec.KVEvents
	if k.Listen != "" {
		host, port, err := net.SplitHostPort(k.Listen)
		n, errPort := strconv.Atoi(port)
		if err != nil || errPort != nil || n < 1 || n+max(k.Ranks, 1)-1 > 65535 {
			m.fault(at+".listen", "is not an address with a port for each rank", "write HOST:PORT, like 0.0.0.0:5557")
		} else if !k.Mode.On() {
			m.note(true, at+".listen", "mode is off", "write mode: entries")
		} else if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			m.note(false, at+".listen", "the streams have no authentication and hold token ids",
				"keep the port inside your network")
		}
	}
	if k.Ranks < 0 || k.Ranks > 1024 {
		m.fault(at+".ranks", "is not a number of ranks", "write 1 to 1024")
	}
	if k.Tokens != "" && k.Tokens != "off" && k.Tokens != "engines" {
		m.fault(at+".tokens", "is not known", "write off or engines")
	}
	if m.Has(at+".tokensTimeout") && k.TokensTimeout <= 0 {
		m.fault(at+".tokensTimeout", "is not a time above 0", `write a short time, like "250ms"`)
	}
	if k.Mode == KVEventsEntries && k.Listen == "" && len(m.Endpoints) > 0 {
		named := false
		for _, e := range m.Endpoints {
			named = named || e.Attribute("kvEvents") != ""
		}
		if !named {
			m.note(false, at+".mode", "no endpoint of the list has the attribute kvEvents",
				"write mode: ask, or add the attribute")
		}
	}
	for _, e := range m.Endpoints {
		if err := kvevents.CheckAttributes(e); err != nil {
			m.fault("spec.discovery.static.endpoints", "has an engine whose "+err.Error(),
				"write tcp://*:5557, or an address for each rank, separated by commas")
			break
		}
	}
}
