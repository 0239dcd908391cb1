// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
)

// servesAlone reports whether an SGLang engine computes prompts itself, so that its response proves nothing. It reads
// the server arguments from GET /server_info (older engines: GET /get_server_info) and returns true if they have a
// disaggregation_mode other than decode. It returns false if they have none.
func servesAlone(ctx context.Context, client *http.Client, engine string) bool {
	for _, path := range []string{"/server_info", "/get_server_info"} {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, engine+path, nil)
		if err != nil {
			return false
		}
		resp, err := client.Do(req)
		if err != nil {
			return false
		}
		var info struct {
			Mode *string `json:"disaggregation_mode"`
		}
		err = json.NewDecoder(io.LimitReader(resp.Body, maxResponse)).Decode(&info)
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK && err == nil && info.Mode != nil {
			return *info.Mode != "decode"
		}
	}
	return false
}
