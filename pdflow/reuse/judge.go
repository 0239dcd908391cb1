// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"fmt"
	"net/http"
	"slices"
)

// judge sets the verdict. Unless the verdict is good, it adds the likely reasons, the likeliest first.
func (r *Report) judge(v *verification) {
	answered := 0
	for _, x := range r.Probes {
		if x.Status == http.StatusOK {
			answered++
		}
	}
	switch {
	case answered < len(r.Probes):
		r.Verdict = Failed
	case r.Different > 0:
		r.Verdict = Wrong
	case r.Reused == 0:
		r.Verdict = NotReused
	case 2*r.Reused < r.PromptTokens:
		r.Verdict = Partly
	default:
		r.Verdict = Reused
	}
	if r.Verdict != Reused {
		r.explain(v)
	}
}

func (r *Report) because(text, remedy string) { r.Reasons = append(r.Reasons, Reason{text, remedy}) }

// explain looks at the evidence in this order: how the requests were served, what the engines did, what the protocol
// needs.
func (r *Report) explain(v *verification) {
	for _, mode := range []string{"aggregated", "fallback"} {
		if slices.ContainsFunc(r.Probes, func(x SyntheticProbe) bool { return x.Mode == mode }) {
			r.because("the gateway served synthetic probes on one engine (X-PD-Mode: "+mode+")",
				"look at the gateway's log and metrics for why no pair could serve: endpoints not ready, a fallback, "+
					"a role that is missing")
		}
	}
	if v.alone {
		r.because("a decode engine runs without --disaggregation-mode decode: it computes every prompt itself, "+
			"whatever room a request names",
			"launch it with --disaggregation-mode decode, and P with --disaggregation-mode prefill; pdctl render "+
				"prints both")
	}
	if v.sglang && r.Connector == "http" && r.Verdict == Failed {
		r.because("connector http relays nothing, and SGLang's engines in a mode of disaggregation refuse a request "+
			"that names no room", "name the protocol that the engines speak: kvConnector.type sglang")
	}
	if r.Verdict == Failed {
		r.explainFailure()
	}
	d, q := r.evidence.decode, r.evidence.prefill
	if r.Verdict == Wrong {
		r.because("a text differs from that of one engine alone: decode read KV that is not the prompt's, or the "+
			"engines are not alike",
			"P and D need the same model, revision, dtype, tokenizer, chat template and engine version; a lease that "+
				"ends before decode reads gives another prompt's KV")
	}
	if d[failedReads]+d[failedNotices] > 0 {
		r.because(fmt.Sprintf("the decode engine counted %d failed transfers", d[failedReads]+d[failedNotices]),
			"P's side channel must be reachable from D (VLLM_NIXL_SIDE_CHANNEL_HOST is no loopback address across "+
				"hosts), and both must run the same build and KV layout; kv_load_failure_policy recompute hides this "+
				"from clients")
	}
	if q[sglangFailed]+q[sglangUnmet] > 0 {
		r.because(
			fmt.Sprintf("the prefill engine counted %d failed transfers, and %d requests that no decode engine "+
				"came for", q[sglangFailed], q[sglangUnmet]),
			"bootstrapHost and bootstrapPort must be P's, as D reaches them, and both engines need the same "+
				"disaggregation_transfer_backend")
	}
	if q[expired]+q[late] > 0 {
		r.because("the handoff expired: the prefill engine freed blocks before decode had read them",
			"raise kv_lease_duration on P and leaseDuration in the connector's config, or shorten the queue in "+
				"front of D")
	}
	if r.Verdict == NotReused || r.Verdict == Partly {
		r.explainMiss(v)
	}
	if len(r.Reasons) == 0 {
		r.because("no counter tells why", "look at the engines' logs; check their launch settings with pdctl check")
	}
}

func (r *Report) explainFailure() {
	codes := map[string]Reason{
		"transfer_missing": {"the prefill engine's response holds no usable KV handoff",
			"P must be launched with this connector's class and as a producer; pdctl check reads its flags"},
		"handoff_expired": {"the KV handoff was too old before decode could be sent",
			"raise the lease, or find what delays decode: its queue, its connections"},
		"timeout": {"a phase ran out of time",
			"an engine waits for KV that does not come: the two legs do not find each other, or an engine is stuck"},
		"no_endpoint": {"no pair of engines is ready", "look at the gateway's /readyz: which role is missing"},
		"decode_failed": {"the decode engine failed, or could not load the KV",
			"look at D's log; it must reach P's transfer address, with the same build and KV layout"},
		"prefill_failed": {"the prefill engine failed or cannot be reached", "look at P's log and the gateway's"},
		"unsupported": {"the gateway refuses the synthetic probe: it is no request that two engines can carry here",
			"see the connector's page for its limits"},
	}
	if r.Connector == "lmcache-pd" {
		codes["timeout"] = Reason{"the prefill engine's notice did not come: it is lost, or was never sent",
			"pd_proxy_host and pd_proxy_port of P must be the gateway's notifyListen as P reaches it, " +
				"pd_skip_proxy_notification must be off, and P must have reached D's receiver ports: P sends no " +
				"notice when its write fails"}
	}
	if r.Connector == "lmcache" || r.Connector == "http" {
		codes["prefill_failed"] = Reason{"the prefill engine failed or cannot be reached: with LMCache's PD mode " +
			"(enable_pd) a request without a disagg_spec ends it",
			"look at P's log; for LMCache's PD mode use kvConnector.type lmcache-pd, and start P again"}
	}
	seen := map[string]bool{}
	for _, x := range r.Probes {
		if x.Status == http.StatusOK || seen[x.Code] {
			continue
		}
		seen[x.Code] = true
		if why, ok := codes[x.Code]; ok {
			r.Reasons = append(r.Reasons, why)
			continue
		}
		r.because(fmt.Sprintf("a synthetic probe was answered with status %d", x.Status),
			"look at the gateway's log and the engines'")
	}
}

// storeChunk is LMCache's default chunk, in tokens. LMCache does not store what is shorter.
const storeChunk = 256

// explainMiss gives the reasons if the responses are right but decode reused nothing.
func (r *Report) explainMiss(v *verification) {
	d := r.evidence.decode
	longest := int64(0)
	for _, x := range r.Probes {
		longest = max(longest, x.PromptTokens)
	}
	if r.evidence.prefill[promptTokens] == 0 && !v.foreign {
		r.because("the prefill engines counted no prompt: the synthetic probes did not reach them",
			"are these the engines that the gateway uses? It may serve from other ones, or from one engine alone")
		return
	}
	chunk := max(v.chunk, 1)
	if r.Connector == "lmcache" {
		chunk = storeChunk
	}
	if longest < chunk {
		r.because(
			fmt.Sprintf("the prompts (%d tokens) are shorter than one block or chunk (%d tokens), which is the least "+
				"that is kept", longest, chunk),
			"verify with longer prompts; for short ones set the store's chunk smaller")
	}
	switch {
	case r.Connector == "http":
		r.because("connector http relays nothing: whether decode finds the KV is up to the engines, and these do not",
			"name the protocol that the engines speak as kvConnector.type: nixl, lmcache, mooncake …")
	case v.records:
		r.because("the decode engine's records tell of no KV that came from another server: it computed the "+
			"prompt itself",
			"both servers need cache_transceiver_config in their files, and decode a release that knows "+
				"disaggregated_params; pdctl render prints the file")
	case r.byResponse, v.alone:
		// explain has already named the engine that served alone.
	case d[asked] == 0:
		r.because("the decode engine never asked its KV connector for anything: it has none, or only as a producer",
			"launch it with --kv-transfer-config of the connector's class, as kv_consumer or kv_both; pdctl render "+
				"prints it")
	case v.traits().Handoff.ContentStore:
		r.explainStore(v)
	case r.Connector == "offload-p2p":
		r.because("the decode engine passed over the peer's coordinates in silence: it has no secondary tier of type "+
			"p2p, or knows another generation of key names (they changed in July 2026), or P is not at this address",
			"both engines need {\"type\": \"p2p\"} in secondary_tiers, and a release that knows remote_prefiller and "+
				"remote_decoder; set p2pHost and p2pPort to the address of P's side channel")
		r.because("hash seeds differ: blocks are found by hashes of their tokens",
			"set the same PYTHONHASHSEED on all engines")
	case r.Connector == "lmcache-pd":
		r.because("nothing was pushed to the decode engine, or it looks for other keys",
			"receiverHost, receiverInitPorts and receiverAllocPorts of D must be its pd_peer addresses, and "+
				"PYTHONHASHSEED must be the same on both")
	case d[promised] == 0:
		r.because("the decode engine asked and was promised nothing: it did not see this protocol's transfer members",
			"does the engines' connector class match kvConnector.type? pdctl check compares them")
	default:
		r.because("the decode engine was promised KV and computed the prompt all the same: the load failed and "+
			"kv_load_failure_policy is recompute",
			"look at D's log; with kv_load_failure_policy fail such requests fail visibly and are tried again")
	}
}

func (r *Report) explainStore(v *verification) {
	r.because("the decode engine looked the prompts up and found none of what the prefill engine had computed: the "+
		"store is not shared",
		"both engines must use the same store (LMCache: the same remote_url or the same lmcache server; "+
			"ExampleConnector: the same shared_storage_path; Mooncake: the same master)")
	r.because("or their hash seeds differ, so that equal prompts have different keys",
		"set the same PYTHONHASHSEED on all engines")
	switch r.Connector {
	case "lmcache":
		r.because("or the engines run LMCache's PD mode (enable_pd) with the synchronous backend, which pushes only "+
			"for requests with a disagg_spec",
			"use kvConnector.type lmcache-pd for them, with notices on (no pd_skip_proxy_notification)")
		r.because("or the store's put was not done when decode looked", "set the connector's settleTime")
	case "mooncake-store":
		r.because("or the store's put was not done when decode looked",
			"put is asynchronous; verify again, or use mooncake beside it")
	}
}
