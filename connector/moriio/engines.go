// SPDX-License-Identifier: Apache-2.0

package moriio

import (
	"errors"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
)

// maxSize bounds tensor- and data-parallel sizes. No engine has more.
const maxSize = 1 << 16

type ports struct{ handshake, notify int }

// engine is one side of a pair as the other must know it.
type engine struct {
	host   string
	zmq    string // host:IP,handshake:PORT,notify:PORT
	ports  ports
	tp, dp int
	rank   int // the data-parallel rank that serves this session
}

type pair struct{ p, d engine }

// pair reads the session's two engines.
func (c *Connector) pair(s *connector.Session) (*pair, error) {
	p, err := c.engine(s.Prefill)
	if err != nil {
		return nil, err
	}
	d, err := c.engine(s.Decode)
	if err != nil {
		return nil, err
	}
	if s.API == connector.APIResponses && p.dp > 1 {
		// The rank cannot be chosen there, and D would write and read beside the right one's memory.
		return nil, &connector.EndpointError{Endpoint: s.Prefill.ID, Attribute: "dpSize", Problem: "is above 1, and /v1/responses cannot name a rank"}
	}
	d.rank = rank(s.DecodeRank(), s.Uint64()>>32, s.Decode, d.dp)
	both := &pair{p, d}
	both.prefillRank(rank(s.PrefillRank(), s.Uint64(), s.Prefill, p.dp))
	return both, nil
}

// prefillRank sets P's rank, and D's where the two engines have as many.
func (p *pair) prefillRank(rank int) {
	p.p.rank = rank
	if p.d.dp == p.p.dp {
		p.d.rank = rank
	}
}

// rank is the session's own where the endpoint says how many there are, else one of the configured number.
func rank(own int, random uint64, e discovery.Endpoint, size int) int {
	if e.Attribute("dpSize") != "" {
		return own
	}
	return int(random % uint64(size)) //nolint:gosec // size is at least 1, and at most maxSize
}

// requestID is the X-Request-Id of both legs. The session's 32 hex digits at its end keep it new with each attempt.
func (p *pair) requestID(s *connector.Session) string {
	return "___prefill_addr_" + p.p.zmq + "___decode_addr_" + p.d.zmq + "_" + s.ID
}

// engine reads an endpoint: what it announced as zmqAddress, or its URL's host and the ports of its attributes or the settings.
func (c *Connector) engine(e discovery.Endpoint) (engine, error) {
	out := engine{ports: c.ports, zmq: strings.TrimSpace(e.Attribute("zmqAddress"))}
	bad := func(attribute, problem string) (engine, error) {
		return engine{}, &connector.EndpointError{Endpoint: e.ID, Attribute: attribute, Problem: problem}
	}
	var err error
	if out.tp, err = connector.IntAttribute(e, "tpSize", c.tp, 1, maxSize); err != nil {
		return engine{}, err
	}
	if out.dp, err = connector.IntAttribute(e, "dpSize", max(c.dp, 1), 1, maxSize); err != nil {
		return engine{}, err
	}
	if out.zmq != "" {
		if !out.parse() {
			return bad("zmqAddress", "is not of the form host:IP,handshake:PORT,notify:PORT")
		}
		return out.addressed(), nil
	}
	if out.ports.handshake, err = connector.PortAttribute(e, "handshakePort", c.ports.handshake); err != nil {
		return engine{}, err
	}
	if out.ports.notify, err = connector.PortAttribute(e, "notifyPort", c.ports.notify); err != nil {
		return engine{}, err
	}
	if e.URL != nil {
		out.host = e.URL.Hostname()
	}
	if !plainHost(out.host) {
		return bad("zmqAddress", "is missing, and the URL's host cannot stand in an address")
	}
	return out.addressed(), nil
}

// addressed writes the address anew from its parts, so that nothing else of an attribute gets into a header.
func (e engine) addressed() engine {
	e.zmq = "host:" + e.host + ",handshake:" + strconv.Itoa(e.ports.handshake) + ",notify:" + strconv.Itoa(e.ports.notify)
	return e
}

// parse reads the address as engines do: parts in any order, unknown ones ignored, each cut at its first colon, so that an IPv6 address
// needs no brackets.
func (e *engine) parse() bool {
	var seen [3]bool
	for part := range strings.SplitSeq(e.zmq, ",") {
		name, value, _ := strings.Cut(part, ":")
		port, err := strconv.ParseUint(strings.TrimSpace(value), 10, 16)
		isPort := err == nil && port > 0
		switch strings.TrimSpace(name) {
		case "host":
			e.host = strings.TrimSpace(value)
			seen[0] = plainHost(e.host)
		case "handshake":
			e.ports.handshake, seen[1] = int(port), isPort //nolint:gosec // 16 bits
		case "notify":
			e.ports.notify, seen[2] = int(port), isPort //nolint:gosec // 16 bits
		}
	}
	return seen == [3]bool{true, true, true}
}

// plainHost wants a name or an address that cannot be taken for another part of the request id.
func plainHost(host string) bool {
	return host != "" && len(host) <= 255 && !strings.Contains(host, "___") && !strings.ContainsFunc(host, func(r rune) bool {
		return r != '.' && r != '-' && r != '_' && r != ':' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	})
}

// CheckEndpoint tells which attribute is missing or malformed.
func (c *Connector) CheckEndpoint(e discovery.Endpoint) error {
	_, err := c.engine(e)
	if bad, ok := errors.AsType[*connector.EndpointError](err); ok {
		remedy := "one of 1 to 65535"
		if bad.Attribute == "zmqAddress" {
			remedy = "host:IP,handshake:PORT,notify:PORT, as the engine announces it"
		}
		return &connector.FieldError{Path: "attributes." + bad.Attribute, Problem: bad.Problem, Remedy: remedy}
	}
	return err
}
