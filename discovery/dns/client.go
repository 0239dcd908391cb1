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

// client asks its servers one after the other, each at most twice, until one answers.
type client struct {
	servers []string // host:port
	timeout time.Duration
}

const (
	tries = 2

	// ednsSize is the largest datagram that a server may send. It passes any network unfragmented (DNS flag day 2020).
	ednsSize = 1232

	// maxStray bounds how many datagrams that do not answer the question, late or forged ones, the client skips before
	// it gives up.
	maxStray = 100
)

var (
	errTimeout     = errors.New("no answer in time")
	errRefused     = errors.New("the server refuses connections")
	errUnreachable = errors.New("the server cannot be reached")
	errGarbage     = errors.New("the answer cannot be read")
)

// exchange returns an answer with records, or one that says that there are none. An error holds no address.
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

// askServer asks one server over UDP. It uses TCP if the answer is too long for UDP, and leaves EDNS out if the server
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

// send sends one question and waits for its answer. Each question has a socket of its own, so that nobody can guess its
// port.
func (c *client) send(ctx context.Context, network, server string, q *wire.Msg) (*wire.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, server)
	if err != nil {
		return nil, plain(err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }) // a deadline in the past
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
		// A truncated message may end in the middle of a record; its header says so.
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

// answers reports whether m answers q: the same id and question, and a response.
func answers(m, q *wire.Msg) bool {
	if m.Id != q.Id || !m.Response || m.Opcode != wire.OpcodeQuery {
		return false
	}
	if len(m.Question) == 0 { // the server could not read the question
		return m.Rcode == wire.RcodeFormatError || m.Rcode == wire.RcodeNotImplemented ||
			m.Rcode == wire.RcodeServerFailure
	}
	want, got := q.Question[0], m.Question[0]
	return len(m.Question) == 1 && got.Qtype == want.Qtype && got.Qclass == want.Qclass &&
		wire.CanonicalName(got.Name) == wire.CanonicalName(want.Name)
}

// plain removes addresses from a network error.
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
