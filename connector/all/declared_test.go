// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/mooncakeascend"
	"github.com/pdkit/pdkit/connector/moriio"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/nixlpush"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

// What two engines cannot serve together: with KV that any number of requests can read, with KV that is read once, and
// with parameters in vLLM's member for them.
const (
	shared = "prompt prompt_logprobs use_beam_search background"
	once   = "n best_of " + shared
	params = once + " sglang:kv_transfer_params"
	// a connector that does not carry three of the APIs
	two = "n best_of prompt prompt_logprobs use_beam_search responses:%[1]s messages:%[1]s generate:%[1]s sglang:%[1]s"
)

// What several connectors declare.
const (
	store   = "prefill-then-decode, many readers, store, reuse in usage"
	relayed = "prefill-then-decode, handoff kv_transfer_params"
	counted = "reuse in usage, count in remote_prefill_cached_tokens"
	ascend  = ", failure stop recomputed, own id, reuse in usage"
	task    = "reuse in usage, by length, orphans, prefill finishes, refusal holds"
	// of those of which D gets P's handoff
	ascendEnd = ", count in remote_prefill_cached_tokens, by length"
	moriIO    = "own id, pair only, reuse in usage, by length, orphans, prefill finishes"
)

// declared have what each connector declares: the orders, the handoff, what becomes of engines. Then come the members
// for which it refuses a request, and the APIs that it does not carry, each with the member that the error names.
var declared = []struct{ typ, config, declares, refuses string }{
	{"http", ``, "prefill-then-decode, many readers", shared}, // no handoff, so none that only one could read
	{"nixl", ``, relayed + ", lease 30s, " + counted + ", refusal releases", params},
	{"nixl", `{"leaseDuration":"7s"}`, relayed + ", lease 7s, " + counted + ", refusal releases", params},
	{"nixl", `{"bidirectional":true}`, relayed + ", lease 30s, from decode, " + counted + ", refusal releases", params},
	{"nixl-push", ``, "together or " + relayed + ", lease 30s, own id, reuse in usage, orphans, prefill finishes",
		params},
	// nothing but P's response says where P is, so there is no other order
	{"nixl-push", `{"dispatch":"serial"}`, relayed + ", lease 30s, own id, " + counted + ", orphans, prefill finishes",
		params},
	{"mooncake", ``, "together or prefill-then-decode, lease 8m0s, " + task, params}, // 480 s, as in vLLM
	{"mooncake", `{"dispatch":"serial","abortTimeout":"1m"}`, "prefill-then-decode or together, lease 1m0s, " + task,
		params},
	// VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
	{"mooncake-ascend", ``, relayed + ", lease 8m0s" + ascend + ascendEnd, params},
	{"mooncake-ascend", `{"leaseDuration":"90s"}`, relayed + ", lease 1m30s" + ascend + ascendEnd, params},
	{"mooncake-hybrid", ``, relayed + ", lease 8m0s" + ascend + ascendEnd, params},
	{"ascend-layerwise", ``, "decode-then-prefill" + ascend + ", by length, orphans, prefill finishes", params},
	{"moriio", ``, "together or " + relayed + ", lease 1m0s, " + moriIO, params}, // defer_timeout; the default is write
	{"moriio", `{"mode":"read","deferTimeout":"90s"}`, relayed + ", lease 1m30s, " + moriIO, params},
	{"p2pnccl", ``, "prefill-then-decode, own id, pair only, reuse in usage, orphans", once + " sglang:text"},
	{"pynccl", ``, "prefill-then-decode", once + " sglang:text"}, // the buffer gives a prompt's KV once
	// a leg that is closed is aborted by its engine, which tells the other, so there are no orphans
	{"sglang", ``, "together, transfer timeout 5m0s, pair only", "n best_of background generate:bootstrap_room"},
	{"trtllm", ``, "prefill-then-decode, handoff choices.0.disaggregated_params, transfer timeout 1m0s",
		fmt.Sprintf(two, "disaggregated_params")}, // D is asked when P has the KV, so there are no orphans
	{"trtllm", `{"dispatch":"generation-first"}`, "together, transfer timeout 1m0s, orphans",
		fmt.Sprintf(two, "disaggregated_params")},
	{"lmcache", ``, store, shared + " sglang:text"},
	// a chunk is there once, for one D: no store
	{"lmcache-pd", ``, "prefill-then-decode, prefill pair only, reuse in usage", params},
	{"lmcache-pd", `{"retFirstTok":true}`, relayed + ", prefill pair only, reuse in usage",
		fmt.Sprintf(two, "kv_transfer_params")},
	{"mooncake-store", ``, store, shared + " sglang:text"}, // nothing is known of the KV's life, so no lease
	{"ascend-store", ``, store, shared + " sglang:text"},
	{"flexkv", ``, store, shared + " sglang:text"},
	{"hf3fs", ``, store, shared + " sglang:text"},
	{"ucm", ``, store, shared + " sglang:text"},
	{"sharedstorage", ``, store, shared + " sglang:text"},
	{"sharedstorage", `{"cacheHitThreshold":0.5}`, "decode-first or " + store,
		strings.TrimPrefix(fmt.Sprintf(two, "cache_hit_threshold"), "n best_of ")},
	// D waits 30 s at most and blocks nothing, so there are no orphans
	{"offload-p2p", ``, "together or prefill-then-decode, reuse in usage", params},
	{"offload-p2p", `{"dispatch":"together"}`, "together or prefill-then-decode, reuse in usage", params},
	{"offload-p2p", `{"dispatch":"serial"}`, "prefill-then-decode or together, reuse in usage", params},
	{"relay", ``, relayed, params},
	{"relay", `{"leaseDuration":"20s"}`, relayed + ", lease 20s", params},
	{"relay", `{"header":"X-KV-Ticket"}`, "prefill-then-decode, handoff header X-KV-Ticket", once + " sglang:text"},
	{"tpu", ``, relayed + ", lease 3m0s, reuse in usage, by length", params},
	{"kvbm", ``, relayed + ", lease 30s, " + counted + ", refusal releases", params},
	{"multi", `{"connectors":[{"type":"nixl","config":{"leaseDuration":"9s"}},{"type":"sharedstorage"}]}`,
		relayed + ", lease 9s, " + counted + ", refusal releases", params},
	{"multi", `{"connectors":[{"type":"sharedstorage"},{"type":"p2pnccl"}]}`,
		// one such child is enough
		"prefill-then-decode, own id, pair only, reuse in usage, orphans", once + " sglang:text"},
	{"multi", `{"connectors":[{"type":"mooncake-ascend"},{"type":"sharedstorage"}]}`,
		relayed + ", lease 8m0s" + ascend + ascendEnd, params},
}

func TestWhatEachConnectorDeclares(t *testing.T) {
	tested := map[string]bool{}
	for _, k := range declared {
		tested[k.typ] = true
		c := play.Open(t, k.typ, k.config)
		assert.Equal(t, k.typ, c.Traits().Name)
		assert.Equal(t, k.declares, declaration(c.Traits()), "%s %s", k.typ, k.config)
		assert.Equal(t, k.refuses, refuses(t, c), "%s %s", k.typ, k.config)
	}
	for _, name := range names.Connectors() {
		assert.True(t, tested[name], "%s is in no row", name)
	}
}

// A lease of zero would not age: a handoff would be sent after its blocks were used again.
func TestZeroValuesDeclareTheSame(t *testing.T) {
	for _, zero := range []connector.KVConnector{&nixl.Connector{}, &nixlpush.Connector{}, &mooncakeascend.Connector{},
		&moriio.Connector{}, &plainhttp.Connector{}} {
		name := zero.Traits().Name
		assert.Equal(t, declaration(play.Open(t, name, ``).Traits()), declaration(zero.Traits()), name)
	}
}

// declaration says in words what is declared, but for names, members, APIs and rules about engines.
func declaration(d connector.Traits) string {
	h, order := d.Handoff, d.Order.String()
	for _, o := range d.OtherOrders {
		order += " or " + o.String()
	}
	list := []string{order}
	for _, v := range []struct {
		name string
		yes  bool
	}{
		{"handoff " + h.Member, h.Member != ""}, {"handoff header " + h.Header, h.Header != ""},
		{"lease " + h.Lease.String(), h.Lease != 0},
		{"transfer timeout " + h.TransferTimeout.String(), h.TransferTimeout != 0},
		{"failure stop " + d.Ending.FailureStop, d.Ending.FailureStop != ""},
		{"many readers", h.MultiUse}, {"store", h.ContentStore}, {"from decode", h.FromDecode},
		{"own id", d.OwnRequestID},
		{"pair only", d.Serving.PairOnly}, {"prefill pair only", d.Serving.PrefillPairOnly},
		{"reuse in usage", d.Serving.ReusedInUsage}, {"count in " + d.Serving.CountKey, d.Serving.CountKey != ""},
		{"by length", d.Ending.EndsByLength}, {"orphans", d.Ending.Orphans},
		{"prefill finishes", d.Ending.PrefillFinishes}, {"refusal releases", d.Ending.RefusalReleases},
		{"refusal holds", d.Ending.RefusalHolds},
	} {
		if v.yes {
			list = append(list, v.name)
		}
	}
	return strings.Join(list, ", ")
}

// refuses asks for what some protocols carry, and then for each API.
func refuses(t *testing.T, c connector.KVConnector) string {
	var list []string
	for _, k := range []struct {
		api  connector.API
		body string
	}{
		{connector.APIChat, `{"n":2}`}, {connector.APICompletions, `{"prompt":"a","best_of":2}`},
		{connector.APICompletions, `{"prompt":["a","b"]}`}, {connector.APIChat, `{"prompt_logprobs":1}`},
		{connector.APICompletions, `{"prompt":"a","use_beam_search":true}`},
		{connector.APIResponses, `{"background":true}`},
	} {
		if m := play.Uncarried(c, play.Request(t, k.api, k.body)); m != "" && check.Of(c).Carries(k.api) {
			list = append(list, m)
		}
	}
	for _, api := range connector.APIs() {
		if m := play.Uncarried(c, play.Request(t, api, `{}`)); m != "" {
			list = append(list, api.String()+":"+m)
		}
	}
	return strings.Join(list, " ")
}
