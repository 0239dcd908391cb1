// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/mooncakeascend"
)

// renderMooncakeAscend gives vllm-ascend's --kv-transfer-config and the time after which P frees blocks that nobody has
// read.
func renderMooncakeAscend(c connector.KVConnector, o *mooncakeascend.Options, t Target) (Settings, error) {
	class := "MooncakeConnectorV1"
	if c.Traits().Name == mooncakeascend.HybridName {
		class = "MooncakeHybridConnector"
	}
	out, err := ascendSettings(t, class, cmp.Or(o.KVPort, mooncakeascend.DefaultKVPort))
	if err != nil {
		return out, err
	}
	out.set("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", strconv.Itoa(int(c.Traits().Handoff.Lease/time.Second)))
	return out, nil
}
