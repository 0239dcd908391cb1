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
		p2p, push  string // the last part of the host, and the port
	}{
		{"one URL for all", "dpSize=8", connector.APIChat, 3, "3", "5 7780", "e_dp3 5 5603"},
		{"the first of two pods", "dpSize=16,dpSizeLocal=8", connector.APIChat, 3, "3", "5 7780", "e_dp3 5 5603"},
		{"the second of two pods", "dpSize=16,dpSizeLocal=8,dpStartRank=8", connector.APIChat, 3, "3", "5 7788",
			"e_dp11 5 5611"},
		{"the second, and dpSize is one pod's", "dpSize=8,dpStartRank=8", connector.APIChat, 3, "3", "5 7788",
			"e_dp11 5 5611"},
		{"one URL for the ranks of two pods", "dpSize=16,pods=10.0.0.5;10.0.0.7", connector.APIChat, 11, "11", "7 7788",
			"e_dp11 7 5611"},
		{"a URL for each of two pods", "dpSize=16,dpSizeLocal=8,dpStartRank=8,pods=10.0.0.7;10.0.0.5",
			connector.APIChat, 3, "3", "5 7788", "e_dp11 5 5611"},
		{"a port for each rank", "dpSize=16,dpSizeLocal=1,dpStartRank=11", connector.APIResponses, 0, "", "5 7788",
			"e_dp11 5 5611"},
		{"a port for rank 0", "dpSize=16,dpSizeLocal=1", connector.APIResponses, 0, "", "5 7777", "e_dp0 5 5600"},
		{"no ranks", "", connector.APIResponses, 0, "", "5 7777", "e 5 5600"},
	} {
		attributes := map[string]string{}
		for entry := range strings.SplitSeq(addresses+c.told, ",") {
			name, value, _ := strings.Cut(entry, "=")
			attributes[name] = strings.ReplaceAll(value, ";", ",")
		}
		s := play.Session(t, c.api, `{"input":"x","messages":[]}`, attributes)
		contract.SetRanks(s, discovery.RankOf(c.rank), discovery.Rank{})
		for name, want := range map[string]string{"offload-p2p": c.p2p, "nixl-push": c.push} {
			k := play.Open(t, name, ``)
			assert.Equal(t, c.header, play.Prefill(t, k, s).Header.Get("X-Data-Parallel-Rank"), "%s: %s", name, c.rule)
			params := gjson.Get(play.Decode(t, k, s, nil).Body, "kv_transfer_params")
			told := "remote_prefiller.remote_host remote_prefiller.remote_port"
			if name == "nixl-push" {
				told = "remote_engine_id remote_host remote_port"
			}
			var got []string
			for path := range strings.SplitSeq(told, " ") {
				got = append(got, strings.TrimPrefix(params.Get(path).String(), "10.0.0."))
			}
			assert.Equal(t, want, strings.Join(got, " "), "%s: %s", name, c.rule)
		}
	}
}
