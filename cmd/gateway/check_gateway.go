// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
	"github.com/pdkit/pdkit/transport"
)

// checkGateway checks the values of a Gateway.
func (l *loader) checkGateway(d *yamlfile.Document, g gatewaySpec) {
	l.add(d, checkAddress("spec.listen", g.Listen))
	if g.Admin != "" {
		l.add(d, checkAddress("spec.admin", g.Admin))
	}
	if clash(g.Listen, g.Admin) {
		l.fault(d, "spec.admin", "is the address of listen too", `give it another port, or turn it off with ""`)
	}
	if g.MaxBodyBytes < 1 {
		l.fault(d, "spec.maxBodyBytes", "is less than 1", "write the largest body that a client may send, in bytes")
	}
	if t := g.TLS; t != nil {
		for _, f := range []struct{ name, path string }{{"certFile", t.CertFile}, {"keyFile", t.KeyFile}} {
			if f.path == "" {
				l.fault(d, "spec.tls."+f.name, "is missing", "write the path of a PEM file")
			}
		}
	}
	if g.MaxBytesInFlight != 0 && g.MaxBytesInFlight-g.MaxBytesInFlight/8 < g.MaxBodyBytes {
		l.fault(d, "spec.maxBytesInFlight", "is, without the eighth that is kept for small bodies, less than "+
			"maxBodyBytes, so the largest bodies could never be served",
			"write several times maxBodyBytes, or lower that")
	}
	if p := g.Passthrough; p != "" && p != "decode" {
		l.fault(d, "spec.passthrough", "is not a known value", "write decode, or leave it out")
	}
	nobody := func(string) (*passthrough.Engines, *pdflow.Error) { return nil, nil }
	for i, p := range g.PassthroughPaths {
		if _, err := passthrough.New(nobody, &passthrough.Options{Paths: []string{p}}); err != nil {
			l.fault(d, fmt.Sprintf("spec.passthroughPaths[%d]", i), "must not pass",
				"write a path like /v1/files or /v1/files/*, which is no order to engines")
		}
	}
	if len(g.PassthroughPaths) > 0 && g.Passthrough == "" {
		l.cfg.notes = append(l.cfg.notes, note{withoutEffect, d.Fault(&config.FieldError{Path: "spec.passthroughPaths",
			Problem: "passthrough is off", Remedy: "write passthrough: decode"})})
	}
	for i, name := range g.ForwardHeaders {
		path := fmt.Sprintf("spec.forwardHeaders[%d]", i)
		client := pdflow.Request{Header: http.Header{http.CanonicalHeaderKey(name): {"x"}}, RequestID: "none"}
		switch {
		case name == "" || strings.ContainsFunc(name, notInHeaderName):
			l.fault(d, path, "is not a header's name", "write a name like X-Tenant")
		case client.EngineHeader(name).Get(name) != "x":
			l.fault(d, path, "must not reach engines", "leave it out")
		}
	}
}

func notInHeaderName(r rune) bool {
	return r != '-' && r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
}

// serverTLS returns what clients' connections are served with.
func (c *configuration) serverTLS() (*tls.Config, error) {
	t := c.gateway.TLS
	config, err := transport.ServerTLSFiles(c.beside(t.CertFile), c.beside(t.KeyFile), c.beside(t.ClientCAFile))
	if err != nil {
		return nil, fmt.Errorf("spec.tls: %w", err)
	}
	return config, nil
}

// checkAddress checks an address to listen on. The error is a *config.FieldError.
func checkAddress(path, addr string) error {
	const remedy = "write HOST:PORT, like 127.0.0.1:8000"
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return &config.FieldError{Path: path, Problem: "is not an address", Remedy: remedy}
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return &config.FieldError{Path: path, Problem: "has no port from 0 to 65535", Remedy: remedy}
	}
	return nil
}

// clash reports whether two addresses cannot both be listened on.
func clash(a, b string) bool {
	hostA, portA, errA := net.SplitHostPort(a)
	hostB, portB, errB := net.SplitHostPort(b)
	if errA != nil || errB != nil || portA != portB || portA == "0" {
		return false
	}
	return hostA == hostB || anyHost(hostA) || anyHost(hostB)
}

func anyHost(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}
