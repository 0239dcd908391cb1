// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"fmt"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/trtllm"
	"github.com/pdkit/pdkit/discovery"
)

// renderTRTLLM gives the settings of trtllm-serve: a YAML file for --extra_llm_api_options with the cache transceiver
// (TensorRT-LLM docs/features/disagg-serving.md, llmapi/llm_args.py CacheTransceiverConfig). A server has the same file
// for either role that a request gives it. But context servers run without the overlap scheduler, as older releases
// require.
func renderTRTLLM(_ connector.KVConnector, o *trtllm.Options, t Target) (Settings, error) {
	out := Settings{Engine: "trtllm"}
	role, context := "generation", t.Endpoint.Role.Has(discovery.RolePrefill)
	if context {
		role = "context"
	}
	var file strings.Builder
	if context {
		file.WriteString("disable_overlap_scheduler: true\n")
	} else {
		// pdctl verify reads these metrics as proof of reuse
		file.WriteString("return_perf_metrics: true\nperf_metrics_max_requests: 100\n")
	}
	file.WriteString("cache_transceiver_config:\n")
	if o.Dispatch == trtllm.GenerationFirst {
		out.noteIf(t.Version.Before(1, 3), "config.dispatch",
			"generation first is in the main branch of 1.3; 1.2 is not known to have it")
		// Only the Python runtime says before a request where the server is (ctx_info_endpoint).
		file.WriteString("  backend: NIXL\n  transceiver_runtime: PYTHON\n")
	} else {
		file.WriteString("  backend: DEFAULT\n")
	}
	if o.AuthKey != "" {
		file.WriteString("# internal_request_auth_key: the same as pdkit's config.authKey, which is not written here\n")
		out.note("config.authKey", "write it into the file as internal_request_auth_key, on all servers alike")
	}
	name := fmt.Sprintf("trtllm-%s-%d.yaml", role, t.Index)
	out.Files = []File{{Name: name, Content: file.String()}}
	out.Args = []string{"--extra_llm_api_options", name}
	out.noteIf(o.MachineID != 0, "config.machineID", "pdkit's own: it tells the ids of several gateways apart")
	out.noteIf(o.Dispatch == trtllm.ContextFirst, "config.dispatch", "the servers' own default")
	out.noLimits(t.Resources, "TensorRT-LLM sends KV from one server's memory to the other's; max_tokens_in_buffer "+
		"and kv_cache_config size that, in tokens")
	out.noteIf(t.CPU, "cpu", "TensorRT-LLM needs NVIDIA GPUs")
	return out, nil
}
