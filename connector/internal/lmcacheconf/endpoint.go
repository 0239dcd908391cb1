// SPDX-License-Identifier: Apache-2.0

package lmcacheconf

import (
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// CheckNoPD is for connectors whose prefill legs have no disagg_spec. It refuses entries of engines of LMCache's
// transfer from engine to engine, whose sender such a leg ends: a prefill engine whose attribute connector names
// lmcache-pd, and an engine with a receiver's ports that does not say what it runs. Of LMCacheConnectorV1, which may be
// either, only the ports say that.
func CheckNoPD(e discovery.Endpoint) error {
	const remedy = "write kvConnector.type: lmcache-pd, or list other engines"
	told := false
	for name := range strings.SplitSeq(e.Attribute(attr.Connector), ",") {
		switch name = strings.TrimSpace(name); {
		case name == "lmcache-pd" && e.Role.Has(discovery.RolePrefill):
			return &config.FieldError{Path: "attributes." + attr.Connector,
				Problem: "is lmcache-pd: the first request of another connector ends this engine", Remedy: remedy}
		case name != "" && name != "LMCacheAscendConnector" && !strings.HasPrefix(name, "LMCacheConnectorV1"):
			told = true
		}
	}
	if told {
		return nil
	}
	for _, name := range []string{"receiverInitPorts", "receiverAllocPorts"} {
		if e.Attribute(name) != "" {
			return &config.FieldError{Path: "attributes." + name, Problem: "is a receiver's of lmcache-pd: the first " +
				"request of another connector ends the prefill engine that sends to it", Remedy: remedy}
		}
	}
	return nil
}
