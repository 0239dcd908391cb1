// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/relay"
)

// renderRelay gives the engines' class, their role, and what the settings have for the engines.
func renderRelay(c connector.KVConnector, o *relay.Options, t Target) (Settings, error) {
	if o.KVConnector == "" {
		return Settings{}, refuse("config.kv_connector", "is missing",
			"write the engines' class name; without it nothing can be rendered")
	}
	s := relayed(t, o.KVConnector, o.ModulePath)
	s.KVTransfer.Extra = o.Extra
	s.noteIf(c.Traits().Handoff.Lease > 0, "config.leaseDuration",
		"how long P keeps unread KV is a setting of the engines that pdkit does not know: keep the two equal")
	s.noLimits(t.Resources, relayedLimits)
	return s, nil
}

// renderTPU gives the settings of tpu-inference's connector.
func renderTPU(c connector.KVConnector, o *relay.TPUOptions, t Target) (Settings, error) {
	s := relayed(t, "TPUConnector", "tpu_inference.distributed.tpu_connector")
	if s.KVTransfer.Role == "kv_both" {
		return Settings{}, refuseBoth("TPUConnector either sends or receives")
	}
	s.set("TPU_KV_TRANSFER_PORT", strconv.Itoa(cmp.Or(o.TransferPort, 9100)))
	s.set("TPU_SIDE_CHANNEL_PORT", strconv.Itoa(cmp.Or(o.NoticePort, 9600)))
	s.set("TPU_P2P_WAIT_PULL_TIMEOUT", strconv.Itoa(int(c.Traits().Handoff.Lease/time.Second)))
	s.noteIf(t.CPU, "cpu", "tpu-inference needs TPUs: these settings are for them")
	s.noLimits(t.Resources, relayedLimits)
	return s, nil
}

const relayedLimits = "KV stays in the engines' own memory"

func relayed(t Target, class, module string) Settings {
	return vllm(&KVTransfer{Connector: class, Role: KVRole(t.Endpoint.Role), ModulePath: module})
}
