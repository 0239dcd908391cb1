// SPDX-License-Identifier: Apache-2.0

package mooncakeascend

import (
	"strconv"
	"time"

	"github.com/pdkit/pdkit/connector/internal/ascendengine"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// Render gives vllm-ascend's --kv-transfer-config and the time after which P frees blocks that nobody has read.
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	class := classV1
	if c.hybrid {
		class = classHybrid
	}
	out, err := ascendengine.Settings(t, class, c.kvPort)
	if err != nil {
		return out, err
	}
	out.Env = append(
		out.Env, launch.EnvVar{Name: "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
			Value: strconv.Itoa(int(c.Traits().Handoff.Lease / time.Second))},
	)
	return out, nil
}

// CheckEndpoint checks the attributes that launch settings need: kvPort, tpSize, dpSize.
func (*Connector) CheckEndpoint(e discovery.Endpoint) error { return ascendengine.CheckEndpoint(e) }
