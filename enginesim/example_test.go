// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/pdkit/pdkit/enginesim"
)

// A prompt is prefilled on one engine and decoded on another, which takes the KV over instead of computing the prompt
// again.
func Example() {
	prefill, decode, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer prefill.Close()
	defer decode.Close()

	const prompt = "Two engines, one response: the first reads the prompt, the second writes."
	first := ask(prefill, map[string]any{
		"prompt": prompt, "max_tokens": 1, "kv_transfer_params": map[string]any{"do_remote_decode": true},
	})
	second := ask(decode, map[string]any{
		"prompt": prompt, "max_tokens": 12, "kv_transfer_params": first["kv_transfer_params"],
	})
	alone := ask(prefill, map[string]any{"prompt": prompt, "max_tokens": 12})

	stats := decode.Stats()
	fmt.Println("tokens computed by decode:", stats.LocalCompute)
	fmt.Println("tokens taken over:", stats.ExternalKVTransfer)
	fmt.Println("bytes moved:", stats.BytesTransferred)
	fmt.Println("same text as one engine:", text(second) == text(alone))
	fmt.Println("handoff used exactly once:", prefill.CheckKV() == nil && decode.CheckKV() == nil)
	// Output:
	// tokens computed by decode: 0
	// tokens taken over: 73
	// bytes moved: 1536
	// same text as one engine: true
	// handoff used exactly once: true
}

func ask(e *enginesim.Engine, body map[string]any) map[string]any {
	data, err := json.Marshal(body)
	if err != nil {
		return nil
	}
	resp, err := http.Post(e.URL()+"/v1/completions", "application/json", bytes.NewReader(data))
	if err != nil {
		return nil
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	response := map[string]any{}
	if data, err = io.ReadAll(resp.Body); err == nil {
		err = json.Unmarshal(data, &response)
	}
	if err != nil {
		return nil
	}
	return response
}

func text(response map[string]any) any {
	choices, ok := response["choices"].([]any)
	if !ok || len(choices) == 0 {
		return nil
	}
	return choices[0].(map[string]any)["text"]
}
