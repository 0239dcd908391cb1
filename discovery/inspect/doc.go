// SPDX-License-Identifier: Apache-2.0

// Package inspect asks engines for what their list does not say: the served model, the version, the number of
// data-parallel ranks, SGLang's bootstrap port, and how busy they are.
//
//	src := inspect.Wrap(list, nil)
//	set := discovery.NewSet(src)
//
// The source publishes each list at once, and again when engines have answered. It never replaces what the list says,
// and does not ask for it. No request waits for a response.
//
// These are the questions, and the engines whose responses are known (tests play recorded responses):
//
//   - GET /v1/models: the first model that is nobody's adapter (vLLM 0.32.0: data[].id, data[].parent) becomes Model.
//     Its max_model_len becomes the attribute maxModelLen, and its adapters the attribute adapters, separated by
//     commas. Where the list or [Options] name a model, that is the one that is meant, whatever comes first; otherwise
//     the adapters are those of any model. An adapter's parent is one of its model's names (several of
//     --served-model-name have the same data[].root) or that root. Adapters come and go while an engine runs: they
//     are asked for in each visit.
//   - GET /version: vLLM 0.32.0's {"version": "0.32.0"} becomes Version.
//   - GET /metrics: the engine label of vLLM's gauges becomes the attribute dpSize, if it counts from 0 without a gap.
//     If it counts from a higher number, the other ranks are in other pods or at other ports, and it becomes
//     dpSizeLocal and dpStartRank (v1/engine/core_client.py of 0.32.0: engine_ranks_managed).
//     The KV usage and the queue (vllm:kv_cache_usage_perc, vllm:num_requests_running, vllm:num_requests_waiting,
//     vllm:num_requests_kv_fetch_by_stage; of SGLang sglang:token_usage, sglang:num_running_reqs,
//     sglang:num_queue_reqs and its queues before and behind a transfer, sglang:num_decode_prealloc_queue_reqs,
//     sglang:num_decode_transfer_queue_reqs, sglang:num_prefill_bootstrap_queue_reqs) become the [Load] of a [Reading],
//     and so does what they count of KV (vllm:prompt_tokens_by_source_total, vllm:nixl_…, sglang:kv_transfer_…,
//     lmcache:local_…), of tokens (vllm:generation_tokens_total, sglang:realtime_tokens_total) and of requests
//     (vllm:request_success_total, sglang:num_requests_total); see [KV].
//     They are no attributes, since each request would then change the list and cause a new snapshot.
//   - GET <bootstrap>/query of Mooncake, where the list has the attribute bootstrapPort or bootstrapURL (vLLM's
//     mooncake_connector; {"<rank>": {"engine_id": …}}): the engine ids of a [Reading], and dpSize where /metrics says
//     nothing.
//   - GET /server_info, else /get_server_info, of SGLang (http_server.py: the server's arguments with dp_size,
//     disaggregation_mode, disaggregation_bootstrap_port, and version): Version and the attributes dpSize and, of a
//     prefill engine, bootstrapPort. All else in that response, which may hold the server's API key, is dropped unread.
//
// One rank 0 never becomes an attribute: if ranks have servers of their own, each server shows only one.
//
// Engines are not trusted. Responses are bounded in size and time, and texts in length. Redirects are not followed. A
// response that makes no sense counts as none. No address is taken from a response, so an engine cannot lead requests
// elsewhere.
package inspect
