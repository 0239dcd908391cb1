// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"net"
	"net/url"
	"strconv"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/ascendlayerwise"
)

// renderAscendLayerwise gives vllm-ascend's --kv-transfer-config. No setting tells an engine where the callback server
// is: each request does.
func renderAscendLayerwise(_ connector.KVConnector, o *ascendlayerwise.Options, t Target) (Settings, error) {
	out, err := ascendSettings(t, "MooncakeLayerwiseConnector", cmp.Or(o.KVPort, ascendlayerwise.DefaultKVPort))
	if err != nil {
		return out, err
	}
	if out.KVTransfer.Role == "kv_consumer" {
		out.note("config.callbackListen",
			"the gateway listens there; it must be open to decode engines, and to nobody else")
		out.note("config.callbackURL", "goes with each request; decode engines must reach it")
		if at := callbackHost(o); loopback(at) && !loopback(t.Endpoint.Host()) {
			out.note("config.callbackURL",
				"is loopback, which this engine, on another host, cannot reach: it would wait for ever")
		}
	}
	return out, nil
}

// callbackHost is the host to which decode engines send callbacks.
func callbackHost(o *ascendlayerwise.Options) string {
	if u, err := url.Parse(o.CallbackURL); err == nil && o.CallbackURL != "" {
		return u.Hostname()
	}
	host, port, _ := net.SplitHostPort(cmp.Or(o.CallbackListen, ascendlayerwise.DefaultCallbackListen))
	if n, err := strconv.Atoi(port); err != nil || n == 0 {
		return "" // a free port, which is not known before the gateway runs
	}
	return host
}
