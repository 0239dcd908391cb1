// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/relay"
)

// renderRelay gives the engines' class, their role, and what the settings have for the engines.
func renderRelay(c connector.KVConnector, o *relay.Options, t Target) (Settings, error) {
	if o.KVConnector == "" {
		return Settings{}, &config.FieldError{Path: "config.kv_connector", Problem: "is missing",
			Remedy: "write the engines' class name; without it nothing can be rendered"}
	}
	s := relayed(t, o.KVConnector, o.ModulePath)
	s.KVTransfer.Extra = o.Extra
	if c.Traits().Handoff.Lease > 0 {
		s.Notes = append(s.Notes, Note{Path: "config.leaseDuration",
			Text: "how long P keeps unread KV is a setting of the engines that pdkit does not know: keep the two " +
				"equal"})
	}
	s.Notes = append(s.Notes, NoLimits(t.Resources, relayedLimits)...)
	return s, nil
}

// renderTPU gives the settings of tpu-inference's connector.
func renderTPU(c connector.KVConnector, o *relay.TPUOptions, t Target) (Settings, error) {
	s := relayed(t, "TPUConnector", "tpu_inference.distributed.tpu_connector")
	if s.KVTransfer.Role == "kv_both" {
		return Settings{}, &config.FieldError{Path: "role",
			Problem: "is both, and an engine with TPUConnector either sends or receives",
			Remedy:  "write prefill or decode; a decode engine serves requests alone, too"}
	}
	s.Env = []EnvVar{
		{Name: "TPU_KV_TRANSFER_PORT", Value: strconv.Itoa(cmp.Or(o.TransferPort, 9100))},
		{Name: "TPU_SIDE_CHANNEL_PORT", Value: strconv.Itoa(cmp.Or(o.NoticePort, 9600))},
		{Name: "TPU_P2P_WAIT_PULL_TIMEOUT", Value: strconv.Itoa(int(c.Traits().Handoff.Lease / time.Second))},
	}
	if t.CPU {
		s.Notes = append(s.Notes, Note{Path: "cpu", Text: "tpu-inference needs TPUs: these settings are for them"})
	}
	s.Notes = append(s.Notes, NoLimits(t.Resources, relayedLimits)...)
	return s, nil
}

const relayedLimits = "KV stays in the engines' own memory"

func relayed(t Target, class, module string) Settings {
	return Settings{
		Engine:     "vllm",
		KVTransfer: &KVTransfer{Connector: class, Role: KVRole(t.Endpoint.Role), ModulePath: module},
		Args:       []string{"--enable-prompt-tokens-details"},
	}
}
