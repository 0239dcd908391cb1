// SPDX-License-Identifier: Apache-2.0

// Package inspect asks engines for what their list does not say: the served model, the version, the number of
// data-parallel ranks, SGLang's bootstrap port, and how busy they are.
//
//	src := inspect.Wrap(list, nil)
//	set := discovery.NewSet(src)
//
// A wrapped source publishes each list at once, as it came, and again when engines have answered. What the list says is
// never replaced: the question is not even asked if the list has its answer. No request waits for it.
//
// What is asked, and of whom the answers are known (tested with what the engines were seen to answer):
//
//   - GET /v1/models: the first model that is nobody's adapter (vLLM 0.32.0: data[].id, data[].parent) becomes Model.
//   - GET /version: vLLM 0.32.0's {"version": "0.32.0"} becomes Version.
//   - GET /metrics: the engine label of vLLM's gauges, if it counts from 0 without a gap, becomes the attribute dpSize;
//     the KV usage and the queue (vllm:kv_cache_usage_perc, vllm:num_requests_running, vllm:num_requests_waiting; of
//     SGLang sglang:token_usage, sglang:num_running_reqs, sglang:num_queue_reqs) become the [Load] of a [Reading]. They
//     are no attributes, since a list that changes with every request would be a new snapshot with every request.
//   - GET <bootstrap>/query of Mooncake, where the list has the attribute bootstrapPort or bootstrapURL (vLLM's
//     mooncake_connector; {"<rank>": {"engine_id": …}}): the engine ids of a [Reading], and dpSize where /metrics says
//     nothing.
//   - GET /server_info, else /get_server_info, of SGLang (http_server.py: the server's arguments with dp_size,
//     disaggregation_mode, disaggregation_bootstrap_port, and version): Version and the attributes dpSize and, of a
//     prefill engine, bootstrapPort. All else in that answer, which may hold the server's API key, is dropped unread.
//
// A number of ranks of 1 is never written as an attribute: where ranks have servers of their own, each shows but one.
//
// Engines are not trusted: answers are bounded in size and time, texts in length, redirects are not followed, and an
// answer that makes no sense is as good as none. No address is taken from an answer, so an engine can lead nobody
// anywhere else.
package inspect
