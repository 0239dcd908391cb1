// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

// renderHTTP gives the launch settings of an engine: none of KV transfer, since this connector names no protocol. What
// the engines need to share KV, if they do, is the affair of the connector that they are launched with.
func renderHTTP(_ connector.KVConnector, o *plainhttp.Options, t Target) (Settings, error) {
	s := Settings{Engine: "vllm", Args: []string{"--enable-prompt-tokens-details"}}
	s.Notes = append(s.Notes, Note{Text: "nothing moves KV between these engines: every prompt is computed " +
		"twice, unless they share a store by settings of their own"})
	for _, idle := range []struct {
		given, ours bool
		path, text  string
	}{
		{o.RequestTimeout != 0, true, "config.requestTimeout",
			"it is the gateway's: the time of the prefill leg, where timeouts.prefill is not given"},
		{o.MaxRetries != 0, true, "config.maxRetries",
			"it is the gateway's: further attempts, where retry.maxAttempts is not given"},
		{o.KVTransferMethod != "", false, "config.kvTransferMethod",
			"implicit is what this connector does: nothing is said to the engines"},
		{t.Resources.MaxMemory != "", false, "resources.maxMemory", "no KV store is rendered that could keep to it"},
		{t.Resources.MaxDisk != "", false, "resources.maxDisk", "no KV store is rendered that could keep to it"},
		{t.Resources.MaxBandwidth != "", false, "resources.maxBandwidth", "no KV is moved"},
	} {
		if idle.given {
			s.Notes = append(s.Notes, Note{NoEffect: !idle.ours, Path: idle.path, Text: idle.text})
		}
	}
	return s, nil
}
