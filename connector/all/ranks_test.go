// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// If an engine's data-parallel ranks are spread over several URLs, P's header names the rank by its number behind the
// URL, and D is told the address that P's engine makes from the number among all ranks (docs/protocols/vllm.md §8).
func TestDIsToldTheAddressOfPsRank(t *testing.T) {
	const addresses = "p2pPort=7777,engineID=e,sideChannelPort=5600,"
	for _, c := range []struct {
		rule, told string
		api        connector.API
		rank       int
		header     string
		p2p, push  string
	}{
		{"one URL for all", "dpSize=8", connector.APIChat, 3, "3", "7780", "e_dp3 5603"},
		{"the first of two pods", "dpSize=16,dpSizeLocal=8", connector.APIChat, 3, "3", "7780", "e_dp3 5603"},
		{"the second of two pods", "dpSize=16,dpSizeLocal=8,dpStartRank=8", connector.APIChat, 3, "3", "7788",
			"e_dp11 5611"},
		{"the second, and dpSize is one pod's", "dpSize=8,dpStartRank=8", connector.APIChat, 3, "3", "7788",
			"e_dp11 5611"},
		{"a port for each rank", "dpSize=16,dpSizeLocal=1,dpStartRank=11", connector.APIResponses, 0, "", "7788",
			"e_dp11 5611"},
		{"a port for rank 0", "dpSize=16,dpSizeLocal=1", connector.APIResponses, 0, "", "7777", "e_dp0 5600"},
		{"no ranks", "", connector.APIResponses, 0, "", "7777", "e 5600"},
	} {
		attributes := map[string]string{}
		for entry := range strings.SplitSeq(addresses+c.told, ",") {
			name, value, _ := strings.Cut(entry, "=")
			attributes[name] = value
		}
		s := play.Session(t, c.api, `{"input":"x","messages":[]}`, attributes)
		contract.SetRanks(s, discovery.RankOf(c.rank), discovery.Rank{})
		for name, want := range map[string]string{"offload-p2p": c.p2p, "nixl-push": c.push} {
			k := play.Open(t, name, ``)
			assert.Equal(t, c.header, play.Prefill(t, k, s).Header.Get("X-Data-Parallel-Rank"), "%s: %s", name, c.rule)
			params := gjson.Get(play.Decode(t, k, s, nil).Body, "kv_transfer_params")
			got := params.Get("remote_prefiller.remote_port").String()
			if name == "nixl-push" {
				got = params.Get("remote_engine_id").String() + " " + params.Get("remote_port").String()
			}
			assert.Equal(t, want, got, "%s: %s", name, c.rule)
		}
	}
}
