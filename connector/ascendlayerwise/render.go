// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise

import (
	"net"
	"net/url"

	"github.com/pdkit/pdkit/connector/internal/ascendengine"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// Render gives vllm-ascend's --kv-transfer-config. No setting tells an engine where the callback server is: each
// request does.
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	out, err := ascendengine.Settings(t, "MooncakeLayerwiseConnector", c.kvPort)
	if err != nil {
		return out, err
	}
	note := func(path, text string) { out.Notes = append(out.Notes, launch.Note{Path: path, Text: text}) }
	if out.KVTransfer.Role == "kv_consumer" {
		note("config.callbackListen",
			"the gateway listens there; it must be open to decode engines, and to nobody else")
		note("config.callbackURL", "goes with each request; decode engines must reach it")
		if u, err := url.Parse(c.url); err == nil && loopback(u.Hostname()) && !loopback(t.Endpoint.Host()) {
			note("config.callbackURL",
				"is loopback, which this engine, on another host, cannot reach: it would wait for ever")
		}
	}
	return out, nil
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// CheckEndpoint checks the attributes that launch settings need: kvPort, tpSize, dpSize.
func (*Connector) CheckEndpoint(e discovery.Endpoint) error { return ascendengine.CheckEndpoint(e) }
