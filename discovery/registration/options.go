// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"
)

// Defaults and limits.
const (
	DefaultExpiry       = 15 * time.Second // three to five missed messages
	DefaultLease        = 15 * time.Second
	DefaultMaxEndpoints = 4096

	minLease = time.Second
	maxLease = time.Hour
)

// Options are a source's settings. Both addresses may be empty for a source whose [Source.Handler] is served elsewhere.
type Options struct {
	Listen string // HOST:PORT for ZeroMQ; "": do not listen
	HTTP   string // HOST:PORT for HTTP; "": do not listen
	Token  string // the bearer token that HTTP clients must send; "": none

	// TokenFile has bearer tokens, one a line, each of which HTTP clients may send besides Token: while tokens change,
	// the old and the new one. The file is read again when it has changed; while it cannot be read or has no token, the
	// last tokens stay.
	TokenFile string

	// Expiry is how long a silent engine stays on the list; default 15 s. vLLM's demo of P2pNccl has 5 s.
	Expiry       time.Duration
	Lease        time.Duration // of HTTP registrations without leaseSeconds, 1 s to 1 h; default 15 s
	MaxEndpoints int           // on the list at once, announced by ZeroMQ or HTTP; default 4096
}

// New checks the settings; nil means the defaults. It opens nothing.
func New(o *Options) (*Source, error) {
	if o == nil {
		o = &Options{}
	}
	s := &Source{opts: *o}
	s.opts.Expiry = cmp.Or(o.Expiry, DefaultExpiry)
	s.opts.Lease = cmp.Or(o.Lease, DefaultLease)
	s.opts.MaxEndpoints = cmp.Or(o.MaxEndpoints, DefaultMaxEndpoints)
	var errs []error
	errs = append(errs, checkAddress("Listen", o.Listen), checkAddress("HTTP", o.HTTP))
	if o.Listen != "" && o.Listen == o.HTTP {
		if _, port, err := net.SplitHostPort(o.HTTP); err == nil && port != "0" {
			errs = append(errs, errors.New("registration: HTTP is the address of Listen too"))
		}
	}
	if s.opts.Expiry < 0 {
		errs = append(errs, errors.New("registration: Expiry is below 0"))
	}
	if s.opts.Lease < minLease || s.opts.Lease > maxLease {
		errs = append(errs, errors.New("registration: Lease is not between 1 s and 1 h"))
	}
	if s.opts.MaxEndpoints < 0 {
		errs = append(errs, errors.New("registration: MaxEndpoints is below 0"))
	}
	tokens, err := readTokens(o.Token, o.TokenFile)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	s.registry = newRegistry(s.opts.Expiry, s.opts.MaxEndpoints)
	s.handler = newHandler(s.registry, tokens, s.opts.Lease)
	return s, nil
}

func checkAddress(name, address string) error {
	if address == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	if n, bad := strconv.Atoi(port); err != nil || bad != nil || n < 0 || n > 65535 {
		return fmt.Errorf("registration: %s is not HOST:PORT", name)
	}
	return nil
}
