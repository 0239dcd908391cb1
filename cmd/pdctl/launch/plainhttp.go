// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

// renderHTTP gives the launch settings of an engine: none of KV transfer, since this connector names no protocol. What
// the engines need to share KV, if they do, is the affair of the connector that they are launched with.
func renderHTTP(_ connector.KVConnector, o *plainhttp.Options, t Target) (Settings, error) {
	s := vllm(nil)
	s.note("", "nothing moves KV between these engines: every prompt is computed twice, unless they share a store by "+
		"settings of their own")
	s.noteIf(o.RequestTimeout != 0, "config.requestTimeout",
		"it is the gateway's: the time of the prefill leg, where timeouts.prefill is not given")
	s.noteIf(o.MaxRetries != 0, "config.maxRetries",
		"it is the gateway's: further attempts, where retry.maxAttempts is not given")
	s.idleIf(o.KVTransferMethod != "", "config.kvTransferMethod",
		"implicit is what this connector does: nothing is said to the engines")
	s.noLimits(config.Resources{MaxMemory: t.Resources.MaxMemory, MaxDisk: t.Resources.MaxDisk},
		"no KV store is rendered that could keep to it")
	s.idleIf(t.Resources.MaxBandwidth != "", "resources.maxBandwidth", "no KV is moved")
	return s, nil
}
