// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"encoding/json"
	"net"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/discovery"
)

// Attributes of endpoints.
const (
	attrEvents      = "kvEvents"
	attrReplay      = "kvEventsReplay"
	attrLoad        = "loadEvents"
	attrSize        = "dpSize"
	attrSizeLocal   = "dpSizeLocal"
	attrStartRank   = "dpStartRank"
	off             = "off"
	maxRanks        = 1024
	errNoAddress    = plainError("kvEvents, kvEventsReplay and loadEvents must be tcp://HOST:PORT")
	errNoEvents     = plainError("the engine publishes no events")
	errNonsense     = plainError("the response makes no sense")
	errBadStatus    = plainError("the response is an error")
	errTooManyRanks = plainError("there are too many ranks")
)

// address says where one rank publishes.
type address struct {
	rank           int
	events, replay string // HOST:PORT, or the URL where all ranks' events are to be taken; replay may be ""
	load           string // HOST:PORT of its load stream; "" is none
}

// CheckAttributes returns what is wrong with an entry's attributes kvEvents, kvEventsReplay and loadEvents, or nil.
func CheckAttributes(e discovery.Endpoint) error {
	_, err := ofAttributes(e)
	return err
}

// ofAttributes returns the addresses that an entry names, none if it names none.
func ofAttributes(e discovery.Endpoint) ([]address, error) {
	lists := [3][]string{list(e.Attribute(attrEvents)), list(e.Attribute(attrReplay)), list(e.Attribute(attrLoad))}
	most := max(len(lists[0]), len(lists[1]), len(lists[2]))
	if most == 0 || len(lists[0]) == 1 && lists[0][0] == off {
		return nil, nil
	}
	if events := lists[0]; len(events) > 0 && strings.HasPrefix(events[0], "http") {
		at, ok := pollAt(events[0], e.Host())
		if !ok || len(events)+len(lists[1])+len(lists[2]) > 1 {
			return nil, errNoPoll
		}
		return []address{{events: at}}, nil
	}
	first, n := 0, 1
	if size, err := strconv.Atoi(strings.TrimSpace(e.Attribute(attrSizeLocal))); err == nil && size > 0 {
		n = size
		first, _ = strconv.Atoi(strings.TrimSpace(e.Attribute(attrStartRank)))
	} else if size, err := strconv.Atoi(strings.TrimSpace(e.Attribute(attrSize))); err == nil && size > 0 {
		n = size
	}
	if most > 1 {
		n = most
	}
	if n > maxRanks || first < 0 || first > maxRanks {
		return nil, errTooManyRanks
	}
	var found []address
	for i := range n {
		a := address{rank: first + i}
		for k, to := range [3]*string{&a.events, &a.replay, &a.load} {
			var ok bool
			if *to, ok = at(lists[k], i, a.rank, e.Host()); !ok {
				return nil, errNoAddress
			}
		}
		found = append(found, a)
	}
	return found, nil
}

func list(text string) (items []string) {
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			items = append(items, item)
		}
	}
	return items
}

// at returns the address of a rank: its own of several, or the one of rank 0 with the rank added to the port; "" where
// there is none.
func at(all []string, i, rank int, host string) (string, bool) {
	if len(all) == 0 {
		return "", true
	}
	if len(all) > 1 {
		if i >= len(all) {
			return "", false
		}
		return parseAddress(all[i], host, 0)
	}
	return parseAddress(all[0], host, rank)
}

// parseAddress reads tcp://HOST:PORT. A wildcard stands for the engine's host.
func parseAddress(text, host string, rank int) (string, bool) {
	rest, ok := strings.CutPrefix(text, "tcp://")
	if !ok {
		return "", false
	}
	name, portText, err := net.SplitHostPort(rest)
	if err != nil {
		return "", false
	}
	port, err := strconv.Atoi(portText)
	if err != nil || port < 1 || port+rank > 65535 {
		return "", false
	}
	switch name {
	case "", "*", "0.0.0.0", "::":
		name = host
	}
	return net.JoinHostPort(name, strconv.Itoa(port+rank)), name != ""
}

// ofVLLM reads the response of GET /kv_event_sources: rank → configuration, with the rank's own ports. Only ports are
// taken from it. An address without a wildcard is one of a socket that connects, or one that vLLM was told to choose
// (tcp://*:0): ours reports whether it connects to a port of this process.
func ofVLLM(body []byte, host string, ours func(port string) bool) ([]address, error) {
	var ranks map[string]struct {
		On       *bool   `json:"enable_kv_cache_events"`
		Kind     string  `json:"publisher"`
		Endpoint string  `json:"endpoint"`
		Replay   *string `json:"replay_endpoint"`
	}
	if json.Unmarshal(body, &ranks) != nil {
		return nil, errNonsense
	}
	if len(ranks) > maxRanks {
		return nil, errTooManyRanks
	}
	var found []address
	for text, r := range ranks {
		rank, err := strconv.Atoi(text)
		if err != nil || rank < 0 || rank > maxRanks {
			return nil, errNonsense
		}
		if r.On != nil && !*r.On || r.Kind == "null" || r.Endpoint == "" {
			continue
		}
		a := address{rank: rank}
		if r.Replay != nil {
			a.replay, _ = portAt(*r.Replay, host)
		}
		at, ok := portAt(r.Endpoint, host)
		if !ok {
			return nil, errNonsense
		}
		// vLLM binds what has a wildcard (_is_bind_endpoint)
		wildcard := strings.Contains(r.Endpoint, "*") || strings.Contains(r.Endpoint, "::")
		if _, port, _ := net.SplitHostPort(at); wildcard || !ours(port) {
			a.events = at
		}
		found = append(found, a)
	}
	if len(found) == 0 {
		return nil, errNoEvents
	}
	return found, nil
}

// portAt puts the host into an address that an engine has named.
func portAt(text, host string) (string, bool) {
	i := strings.LastIndexByte(text, ':')
	if i < 0 || !strings.HasPrefix(text, "tcp://") {
		return "", false
	}
	port, err := strconv.Atoi(text[i+1:])
	if err != nil || port < 1 || port > 65535 {
		return "", false
	}
	return net.JoinHostPort(host, strconv.Itoa(port)), true
}

// ofSGLang reads the member kv_events of GET /server_info.
func ofSGLang(body []byte, host string) ([]address, error) {
	var info struct {
		Events *struct {
			Kind   string `json:"publisher"`
			Port   int    `json:"endpoint_port_base"`
			Replay int    `json:"replay_endpoint_port_base"` // newer than the rest
			Load   int    `json:"load_endpoint_port_base"`
			Size   int    `json:"dp_size"`
		} `json:"kv_events"`
	}
	if json.Unmarshal(body, &info) != nil {
		return nil, errNonsense
	}
	e := info.Events
	if e == nil || e.Kind == "null" || e.Port == 0 {
		return nil, errNoEvents
	}
	if e.Size > maxRanks {
		return nil, errTooManyRanks
	}
	if e.Port < 1 || e.Port+e.Size > 65535 {
		return nil, errNonsense
	}
	base := func(port, rank int) string {
		if port < 1 || port+e.Size > 65535 {
			return ""
		}
		return net.JoinHostPort(host, strconv.Itoa(port+rank))
	}
	var found []address
	for rank := range max(e.Size, 1) {
		found = append(found, address{rank, base(e.Port, rank), base(e.Replay, rank), base(e.Load, rank)})
	}
	return found, nil
}
