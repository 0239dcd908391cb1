// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// describeRegistration says where engines announce themselves.
func describeRegistration(r modelserver.Registration) string {
	var at []string
	if r.Listen != "" {
		at = append(at, "ZeroMQ at "+r.Listen)
	}
	if r.HTTP != "" {
		at = append(at, "HTTP at "+r.HTTP)
	}
	return strings.Join(at, " and ")
}

// checkListeners finds addresses that two parts would listen on. A client that may ask for a response must not be able
// to register an engine, and a registration does not say for which model it is.
func (l *loader) checkListeners() {
	type listener struct {
		doc        *yamlfile.Document
		path, addr string
	}
	var taken []listener
	if l.gateway != nil {
		taken = append(taken, listener{l.gateway, "spec.listen", l.cfg.gateway.Listen},
			listener{l.gateway, "spec.admin", l.cfg.gateway.Admin})
	} else {
		taken = append(taken, listener{nil, "listen", l.cfg.gateway.Listen},
			listener{nil, "admin", l.cfg.gateway.Admin})
	}
	for _, m := range l.cfg.models {
		const at = "spec.discovery.registration"
		r := m.Spec.Discovery.Registration
		for _, own := range []listener{{m.doc, at + ".listen", r.Listen}, {m.doc, at + ".http", r.HTTP}} {
			for _, t := range taken {
				if !clash(own.addr, t.addr) {
					continue
				}
				problem := "is the address of the Gateway's " + t.path + " too"
				if t.doc != nil {
					problem = fmt.Sprintf("is the address of %s on line %d too", t.path, t.doc.LineOf(t.path))
				}
				l.fault(own.doc, own.path, problem, "give it a port of its own")
				break
			}
			taken = append(taken, own)
		}
	}
}
