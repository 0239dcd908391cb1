// SPDX-License-Identifier: Apache-2.0

package moriio

import (
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// The attributes that hold the mode that an engine announces, the hosts of its pods, and the ranks of one pod.
const (
	attrMode  = "mode"
	attrPods  = attr.Pods
	attrLocal = attr.DPSizeLocal
)

// maxSize bounds the tensor- and data-parallel sizes. No engine has more ranks.
const maxSize = 1 << 16

type ports struct{ handshake, notify int }

// engine is what one engine of a pair must know about the other.
type engine struct {
	host   string
	ports  ports
	tp, dp int
	local  int      // the ranks of one pod; dp if there is one pod
	pods   []string // the hosts of the pods, in the order of their ranks; nil if there is one
	rank   int      // the data-parallel rank of the pod that serves this session
}

type pair struct{ p, d engine }

// pair reads the session's two engines.
func (c *Connector) pair(s *connector.Session) (both pair, err error) {
	if both.p, err = c.engine(s.Prefill); err != nil {
		return both, err
	}
	if both.d, err = c.engine(s.Decode); err != nil {
		return both, err
	}
	if s.API == connector.APIResponses && both.p.local > 1 {
		// The leg cannot choose the rank, so D would write and read in another rank's memory.
		return both, &connector.UnsupportedError{Member: "X-data-parallel-rank"}
	}
	both.d.rank = rank(s.DecodeRank, s.Uint64()>>32, s.Decode, both.d.local)
	both.prefillRank(rank(s.PrefillRank, s.Uint64(), s.Prefill, both.p.local))
	return both, nil
}

// pod is what D must know of P: only the pod behind P's URL, as if it was the whole engine. So P's rank needs no number
// among those of all pods, which only P knows. llm-d does the same.
func (e engine) pod() engine {
	if e.local < e.dp {
		e.dp, e.pods = e.local, []string{e.host}
	}
	return e
}

// prefillRank sets P's rank, and also D's if both pods have the same number of ranks.
func (p *pair) prefillRank(rank int) {
	p.p.rank = rank
	if p.d.local == p.p.local {
		p.d.rank = rank
	}
}

// rank is the session's own rank if the endpoint says how many are behind its URL. Otherwise it is one of the
// configured number. It needs no number among the ranks of all pods: an engine counts its ports from its pod's first
// rank (moriio_common.py of vLLM 0.32.0: fold_local_rank).
func rank(own int, random uint64, e discovery.Endpoint, size int) int {
	if size < 2 {
		return 0
	}
	if e.Attribute(attr.DPSize) != "" || e.Attribute(attrLocal) != "" {
		return own % size
	}
	return int(random % uint64(size))
}

// requestID is the X-Request-Id of both legs. It ends with the session's 32 hex digits, which are new for each attempt.
func (p *pair) requestID(s *connector.Session) string {
	b := make([]byte, 0, 256)
	b = p.p.appendAddress(append(b, "___prefill_addr_"...))
	b = p.d.appendAddress(append(b, "___decode_addr_"...))
	return string(append(append(b, '_'), s.ID...))
}

// appendAddress writes an engine's address in the form in which the engine announces it.
func (e *engine) appendAddress(b []byte) []byte {
	b = append(append(b, "host:"...), e.host...)
	b = strconv.AppendInt(append(b, ",handshake:"...), int64(e.ports.handshake), 10)
	return strconv.AppendInt(append(b, ",notify:"...), int64(e.ports.notify), 10)
}

// Engine is how an engine is reached, and its sizes.
type Engine struct {
	Host                      string
	HandshakePort, NotifyPort int
	TP, DP                    int
	Local                     int // the data-parallel ranks of one pod; DP if there is one pod
}

// Engine reads an engine's attributes; those that are missing are the connector's settings. The error is a
// *[attr.Error].
func (c *Connector) Engine(e discovery.Endpoint) (Engine, error) {
	at, err := c.engine(e)
	return Engine{Host: at.host, HandshakePort: at.ports.handshake, NotifyPort: at.ports.notify, TP: at.tp, DP: at.dp,
		Local: at.local}, err
}

// engine reads an endpoint: the address that it announced as zmqAddress, or its URL's host and the ports of its
// attributes or of the settings.
func (c *Connector) engine(e discovery.Endpoint) (engine, error) {
	out := engine{ports: c.ports}
	bad := func(attribute, problem string) (engine, error) {
		return engine{}, &attr.Error{Endpoint: e.ID, Attribute: attribute, Problem: problem}
	}
	// P would not wait for an engine of the other mode, or would wait for notices that nobody sends.
	if mode := e.Attribute(attrMode); mode != "" && mode != c.mode() {
		return bad(attrMode, "is not the mode of the connector")
	}
	var err error
	if out.tp, err = attr.Int(e, "tpSize", c.tp, 1, maxSize); err != nil {
		return engine{}, err
	}
	if out.dp, err = attr.Int(e, "dpSize", max(c.dp, 1), 1, maxSize); err != nil {
		return engine{}, err
	}
	local := c.local
	if local == 0 || local > out.dp {
		local = out.dp
	}
	if out.local, err = attr.Int(e, attrLocal, local, 1, out.dp); err != nil {
		return engine{}, err
	}
	if out.pods, err = pods(e, &out); err != nil {
		return engine{}, err
	}
	if zmq := strings.TrimSpace(e.Attribute("zmqAddress")); zmq != "" {
		if !out.parse(zmq) {
			return bad("zmqAddress", "is not of the form host:IP,handshake:PORT,notify:PORT")
		}
		return out, nil
	}
	if out.ports.handshake, err = attr.Port(e, "handshakePort", c.ports.handshake); err != nil {
		return engine{}, err
	}
	if out.ports.notify, err = attr.Port(e, "notifyPort", c.ports.notify); err != nil {
		return engine{}, err
	}
	if e.URL != nil {
		out.host = e.URL.Hostname()
	}
	if !plainHost(out.host) {
		return bad("zmqAddress", "is missing, and the URL's host cannot stand in an address")
	}
	return out, nil
}

// pods reads the hosts of an engine of several pods. D's must be there: P learns the number of D's rank among those of
// all pods. P's need not, since D learns only the pod behind P's URL.
func pods(e discovery.Endpoint, of *engine) (hosts []string, err error) {
	text := strings.TrimSpace(e.Attribute(attrPods))
	if of.local == of.dp || text == "" && !e.Role.Has(discovery.RoleDecode) {
		return nil, nil
	}
	hosts = strings.Split(text, ",")
	for i, h := range hosts {
		hosts[i] = strings.TrimSpace(h)
	}
	notPlain := func(host string) bool { return !plainHost(host) }
	if len(hosts) != (of.dp+of.local-1)/of.local || slices.ContainsFunc(hosts, notPlain) {
		err = &attr.Error{Endpoint: e.ID, Attribute: attrPods,
			Problem: "does not name the host of each pod"}
	}
	return hosts, err
}

// parse reads an address as engines do: the parts come in any order, unknown ones are ignored, and each part is cut at
// its first colon, so an IPv6 address needs no brackets.
func (e *engine) parse(zmq string) bool {
	var seen [3]bool
	for part := range strings.SplitSeq(zmq, ",") {
		name, value, _ := strings.Cut(part, ":")
		port, err := strconv.ParseUint(strings.TrimSpace(value), 10, 16)
		isPort := err == nil && port > 0
		switch strings.TrimSpace(name) {
		case "host":
			e.host = strings.TrimSpace(value)
			seen[0] = plainHost(e.host)
		case "handshake":
			e.ports.handshake, seen[1] = int(port), isPort
		case "notify":
			e.ports.notify, seen[2] = int(port), isPort
		}
	}
	return seen == [3]bool{true, true, true}
}

// plainHost reports whether host is a name or an address that cannot be mistaken for another part of the request id.
func plainHost(host string) bool {
	return host != "" && len(host) <= 255 && !strings.Contains(host, "___") &&
		!strings.ContainsFunc(host, func(r rune) bool {
			return r != '.' && r != '-' && r != '_' && r != ':' && (r < '0' || r > '9') && (r < 'a' || r > 'z') &&
				(r < 'A' || r > 'Z')
		})
}

// CheckEndpoint reports which attribute is missing or malformed.
func (c *Connector) CheckEndpoint(e discovery.Endpoint) error {
	_, err := c.engine(e)
	return attr.Faults(err, remedies)
}

// mode is the name that engines announce for the connector's mode.
func (c *Connector) mode() string {
	if c.read {
		return ModeRead
	}
	return ModeWrite
}

var remedies = map[string]string{
	attrMode:        "launch the engine with the connector's mode: read_mode true for read, false for write",
	"zmqAddress":    "host:IP,handshake:PORT,notify:PORT, as the engine announces it",
	"handshakePort": "the engine's handshake_port, 1 to 65535",
	"notifyPort":    "the engine's notify_port, 1 to 65535",
	"tpSize":        "the engine's tensor-parallel size",
	"dpSize":        "the engine's data-parallel size, of all its pods",
	attrLocal:       "the ranks of one pod, no more than dpSize",
	attrPods:        "the hosts of all pods of the engine, in the order of their ranks: 10.0.0.5,10.0.0.7",
}
