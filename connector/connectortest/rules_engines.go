// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/discovery"
)

// toIPv6 gives an engine an IPv6 address, in its URL and wherever its attributes had its host.
func toIPv6(e discovery.Endpoint, address, port string) discovery.Endpoint {
	host := e.Host()
	e.URL = &url.URL{Scheme: e.URL.Scheme, Host: "[" + address + "]:" + port, Path: e.URL.Path}
	e.Attributes = maps.Clone(e.Attributes)
	for name, v := range e.Attributes {
		if v == host {
			e.Attributes[name] = address
		} else {
			e.Attributes[name] = strings.ReplaceAll(v, host, "["+address+"]")
		}
	}
	return e
}

func checkIPv6(t *trial) error {
	return t.excused(t.Except.BareIPv6, "BareIPv6", t.bracketed())
}

// bracketed plays sessions between IPv6 engines.
func (t *trial) bracketed() error {
	t.Prefill, t.Decode = toIPv6(t.Prefill, addressP6, "8100"), toIPv6(t.Decode, addressD6, "8200")
	err := t.each(plains, func(_ sample, p *played) error {
		for name, leg := range p.legs() {
			for v := range t.values(leg) {
				if err := checkAddress(v); err != nil {
					return fmt.Errorf("the %s leg: %w", name, err)
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, call := range t.calls {
		if err := checkAddress(call); err != nil {
			return fmt.Errorf("a side call: %w", err)
		}
	}
	return nil
}

// checkAddress checks a text that may hold one of the suite's IPv6 addresses: alone, or in brackets.
func checkAddress(v string) error {
	for _, address := range []string{addressP6, addressD6} {
		if v == address {
			continue
		}
		for rest := v; ; {
			before, after, found := strings.Cut(rest, address)
			if !found {
				break
			}
			if !strings.HasSuffix(before, "[") || !strings.HasPrefix(after, "]") {
				return fmt.Errorf("the address in %q needs brackets", v)
			}
			rest = after
		}
		if strings.Contains(v, "://") && strings.Contains(v, address) {
			if u, err := url.Parse(v); err != nil || u.Host == "" {
				return fmt.Errorf("%q is no URL", v)
			}
		}
	}
	return nil
}

// junk are values that some attribute may have in a file.
var junk = []string{"", " ", "x", "-1", "0", "65536", "99999999999999999999", "1,,2", "::", "http://", "http://[::1",
	"a b", plantedValue}

func checkAttributes(t *trial) error {
	r := request(plain(t.apis[0]))
	if _, err := t.agree("neither engine changed", r); err != nil {
		return err
	}
	if _, err := t.play(t.session(r, 7000)); err != nil {
		return fmt.Errorf("with the harness's engines: %w", err)
	}
	for _, side := range []struct {
		name   string
		role   discovery.Role
		engine *discovery.Endpoint
	}{{"prefill", discovery.RolePrefill, &t.Prefill}, {"decode", discovery.RoleDecode, &t.Decode}} {
		good := side.engine.Attributes
		declared := map[string]bool{}
		for name := range good {
			declared[name] = false
		}
		for _, a := range t.traits.Attributes {
			if a.Role&side.role != 0 {
				declared[a.Name] = true
			}
		}
		for _, name := range slices.Sorted(maps.Keys(declared)) {
			for _, v := range junk {
				bad := map[string]string{}
				maps.Copy(bad, good)
				if bad[name] = v; v == "" {
					delete(bad, name)
				}
				side.engine.Attributes = bad
				failed, err := t.agree(fmt.Sprintf("%s's attribute %s is %q", side.name, name, v), r)
				switch {
				case err != nil:
					return err
				case v == "" && failed && !declared[name]:
					return fmt.Errorf("the legs need %s's attribute %s, which Traits' Attributes do not declare",
						side.name, name)
				case v == "" && !failed && declared[name]:
					return fmt.Errorf("its Traits' Attributes declare %s's %s, but the legs do without", side.name,
						name)
				}
			}
		}
		side.engine.Attributes = nil
		if _, err := t.agree(side.name+" without attributes", r); err != nil {
			return err
		}
		side.engine.Attributes = good
	}
	t.Prefill.Attributes, t.Decode.Attributes = nil, nil
	_, err := t.agree("neither engine with attributes", r)
	return err
}

// agree checks that a session fails at its engines exactly if a configuration check tells of them: a fault must not
// wait for the first request. New connectors are used, since what one knows of an engine may be kept.
func (t *trial) agree(what string, r *connector.ClientRequest) (failed bool, err error) {
	var playErr error
	if err := t.anew(func(u *trial) error { _, playErr = u.play(u.session(r, 7000)); return nil }); err != nil {
		return false, err
	}
	if panicked(playErr) {
		return false, fmt.Errorf("%s: %w", what, playErr)
	}
	var told error
	for _, e := range []discovery.Endpoint{t.Prefill, t.Decode} {
		err := guard(func() error { return check.Of(t.c).CheckEndpoint(e) })
		if panicked(err) {
			return false, fmt.Errorf("%s: CheckEndpoint: %w", what, err)
		}
		for _, fe := range config.FieldErrors(err) {
			if !strings.HasPrefix(fe.Path, "attributes.") && !strings.HasPrefix(fe.Path, "attributes[") {
				return false, fmt.Errorf("%s: CheckEndpoint's fault has the path %q: want attributes.NAME", what,
					fe.Path)
			}
		}
		told = errors.Join(told, err)
	}
	if playErr == nil {
		return false, nil // what only a configuration check minds may still work
	}
	bad, isEndpoint := errors.AsType[*attr.Error](playErr)
	switch {
	case !isEndpoint:
		return false, fmt.Errorf("%s: want an EndpointError, got: %w", what, playErr)
	case bad.Endpoint != t.Prefill.ID && bad.Endpoint != t.Decode.ID:
		return false, fmt.Errorf("%s: the EndpointError names %q, which is neither engine's ID", what, bad.Endpoint)
	case told == nil:
		return false, fmt.Errorf("%s: CheckEndpoint and Traits' Attributes say nothing, but the legs fail: %w", what,
			playErr)
	}
	return true, nil
}
