// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"context"
	"errors"
	"net"
	"os"
	"syscall"
	"time"

	wire "github.com/miekg/dns"
)

// client asks servers, each twice at most, until one knows.
type client struct {
	servers []string // host:port
	timeout time.Duration
}

const (
	tries = 2

	// ednsSize is what a server may send in one datagram: it fits unfragmented through any network (DNS flag day 2020).
	ednsSize = 1232

	// maxStray bounds the datagrams that are no answer to the question, late or forged, before the question is given
	// up.
	maxStray = 100
)

var (
	errTimeout     = errors.New("no answer in time")
	errRefused     = errors.New("the server refuses connections")
	errUnreachable = errors.New("the server cannot be reached")
	errGarbage     = errors.New("the answer cannot be read")
)

// exchange returns an answer that says what is, or is not. An error holds no address.
func (c *client) exchange(ctx context.Context, name string, kind uint16) (answer, error) {
	var last error
	for range tries {
		for _, server := range c.servers {
			m, err := c.askServer(ctx, server, name, kind)
			if ctx.Err() != nil {
				return answer{}, errTimeout
			}
			if err == nil {
				var a answer
				if a, err = read(m, name, kind); err == nil {
					return a, nil
				}
			}
			last = err
		}
	}
	return answer{}, last
}

// askServer asks one server over UDP; over TCP where the answer is too long for that; and without EDNS where the server
// does not know it.
func (c *client) askServer(ctx context.Context, server, name string, kind uint16) (*wire.Msg, error) {
	q := new(wire.Msg)
	q.SetQuestion(name, kind)
	q.SetEdns0(ednsSize, false)
	m, err := c.send(ctx, "udp", server, q)
	if err == nil && (m.Rcode == wire.RcodeFormatError || m.Rcode == wire.RcodeNotImplemented) && m.IsEdns0() == nil {
		q = new(wire.Msg)
		q.SetQuestion(name, kind)
		m, err = c.send(ctx, "udp", server, q)
	}
	if err == nil && m.Truncated {
		m, err = c.send(ctx, "tcp", server, q)
		if err == nil && m.Truncated {
			err = errGarbage
		}
	}
	return m, err
}

// send sends one question over a socket of its own, so that its port cannot be guessed, and waits for the answer to it.
func (c *client) send(ctx context.Context, network, server string, q *wire.Msg) (*wire.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, server)
	if err != nil {
		return nil, plain(err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }) // a deadline that has passed
	defer stop()

	co := &wire.Conn{Conn: conn, UDPSize: wire.MaxMsgSize}
	if err := co.WriteMsg(q); err != nil {
		return nil, plain(err)
	}
	for range maxStray {
		p, err := co.ReadMsgHeader(nil)
		if err != nil && !errors.Is(err, wire.ErrShortRead) {
			return nil, plain(err)
		}
		m := new(wire.Msg)
		broken := err != nil || m.Unpack(p) != nil
		// A message that was cut may break in the middle of a record; its header says so.
		cut := broken && network == "udp" && err == nil && m.Truncated && m.Id == q.Id && m.Response
		if cut || !broken && answers(m, q) {
			return m, nil
		}
		if network == "tcp" {
			break
		}
	}
	return nil, errGarbage
}

// answers reports whether m is an answer to q, by the id, the question, and the kind of message.
func answers(m, q *wire.Msg) bool {
	if m.Id != q.Id || !m.Response || m.Opcode != wire.OpcodeQuery {
		return false
	}
	if len(m.Question) == 0 { // a server that could not read the question
		return m.Rcode == wire.RcodeFormatError || m.Rcode == wire.RcodeNotImplemented ||
			m.Rcode == wire.RcodeServerFailure
	}
	want, got := q.Question[0], m.Question[0]
	return len(m.Question) == 1 && got.Qtype == want.Qtype && got.Qclass == want.Qclass &&
		wire.CanonicalName(got.Name) == wire.CanonicalName(want.Name)
}

// plain takes the addresses out of a network's error.
func plain(err error) error {
	ne, isNet := errors.AsType[net.Error](err)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded),
		errors.Is(err, context.Canceled), isNet && ne.Timeout():
		return errTimeout
	case errors.Is(err, syscall.ECONNREFUSED):
		return errRefused
	}
	return errUnreachable
}
