// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/discovery"
)

// entries have the attributes of an engine at http://10.0.0.5:8100, and the faults for which its entry is refused: each
// begins with the attribute's name.
var entries = []struct {
	rule, typ, config string
	role              discovery.Role
	told              string
	faults            []string
}{
	{"a decode engine needs nothing", "nixl-push", ``, discovery.RoleDecode, "", nil},
	{"both are a prefill engine too", "nixl-push", ``, discovery.RoleBoth, "", []string{"engineID", "sideChannelPort"}},
	{"all faults at once", "nixl-push", ``, discovery.RolePrefill, "tpSize=0,ppSize=x",
		[]string{"engineID", "sideChannelPort", "tpSize", "ppSize"}},
	{"a URL is no host", "nixl-push", ``, discovery.RolePrefill,
		"engineID=e,sideChannelPort=1,sideChannelHost=tcp://h", []string{"sideChannelHost"}},
	{"no port for the last rank", "nixl-push", ``, discovery.RolePrefill,
		"engineID=e,sideChannelPort=65535,dpSize=2", []string{"sideChannelPort"}},
	{"nor for the last rank of the second pod", "nixl-push", ``, discovery.RolePrefill,
		"engineID=e,sideChannelPort=65530,dpSize=4,dpStartRank=4", []string{"sideChannelPort"}},
	{"the last port for the only one", "nixl-push", ``, discovery.RolePrefill, "engineID=e,sideChannelPort=65535", nil},
	{"P's response says where P is", "nixl-push", `{"dispatch":"serial"}`, discovery.RolePrefill, "", nil},

	{"host and port have defaults", "offload-p2p", ``, discovery.RolePrefill, "", nil},
	{"nobody asks D", "offload-p2p", ``, discovery.RoleDecode, "p2pPort=x", nil},
	{"no port for the last rank", "offload-p2p", ``, discovery.RolePrefill, "p2pPort=65535,dpSize=2",
		[]string{"p2pPort: leaves"}},
	{"more ranks here than there are", "offload-p2p", ``, discovery.RolePrefill, "dpSize=2,dpSizeLocal=4",
		[]string{"dpSizeLocal"}},
	{"no hosts", "offload-p2p", ``, discovery.RolePrefill, "dpSize=2,pods=http://h", []string{"pods"}},
	{"nor these", "nixl-push", ``, discovery.RolePrefill, "engineID=e,sideChannelPort=1,dpSize=2,pods=a b",
		[]string{"pods"}},
	{"no number of a rank", "offload-p2p", ``, discovery.RolePrefill, "dpStartRank=-1", []string{"dpStartRank"}},
	{"no port", "offload-p2p", ``, discovery.RolePrefill, "p2pPort=x", []string{"p2pPort: is not"}},
	{"no ranks", "offload-p2p", ``, discovery.RolePrefill, "dpSize=0", []string{"dpSize"}},
	{"a URL is no host", "offload-p2p", ``, discovery.RolePrefill, "p2pHost=http://h", []string{"p2pHost"}},

	{"sizes are numbers", "mooncake-ascend", ``, discovery.RolePrefill, "tpSize=4", nil},
	{"and not 0", "mooncake-ascend", ``, discovery.RoleDecode, "tpSize=0", []string{"tpSize"}},
	{"nor are ranks", "mooncake-ascend", ``, discovery.RoleDecode, "dpSize=0", []string{"dpSize"}},
	{"nor is a port", "mooncake-ascend", ``, discovery.RoleDecode, "kvPort=0", []string{"kvPort"}},

	{"all has a default", "sglang", ``, discovery.RolePrefill, "", nil},
	{"an address of its own", "sglang", ``, discovery.RolePrefill,
		"bootstrapPort=8998,dpSize=8,bootstrapHost=fd00::1", nil},
	{"no port", "sglang", ``, discovery.RolePrefill, "bootstrapPort=x", []string{"bootstrapPort"}},
	{"no ranks", "sglang", ``, discovery.RolePrefill, "dpSize=0", []string{"dpSize"}},
	{"a URL is no host", "sglang", ``, discovery.RolePrefill, "bootstrapHost=http://p", []string{"bootstrapHost"}},
	{"nobody asks D", "sglang", ``, discovery.RoleDecode, "bootstrapPort=x", nil},

	{"an address", "p2pnccl", ``, discovery.RolePrefill, "zmqAddress=p-0.engines:21001", nil},
	{"none", "p2pnccl", ``, discovery.RoleDecode, "", []string{"zmqAddress"}},
	{"an encode engine takes no part", "p2pnccl", ``, discovery.RoleEncode, "zmqAddress=10.0.1.2", nil},
	{"nor does one that serves alone", "p2pnccl", ``, discovery.RoleBoth, "zmqAddress=10.0.1.2", nil},
}

// TestEntriesOfEngines finds at start what would otherwise make requests hang.
func TestEntriesOfEngines(t *testing.T) {
	for _, k := range entries {
		t.Run(k.typ+" "+k.rule, func(t *testing.T) {
			e := play.Engine(t, "http://10.0.0.5:8100", k.role, attributes(k.told))
			faults := config.FieldErrors(check.Of(play.Open(t, k.typ, k.config)).CheckEndpoint(e))
			if !assert.Len(t, faults, len(k.faults), "%v", faults) {
				return
			}
			for i, fault := range faults {
				assert.True(t, strings.HasPrefix(fault.Error(), "attributes."+k.faults[i]), fault)
				assert.NotEmpty(t, fault.Remedy)
			}
		})
	}
}
