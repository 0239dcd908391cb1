// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"context"
	"net/http"
)

// servesAlone reports whether an SGLang engine computes prompts itself, so that its response proves nothing. It reads
// the server arguments from GET /server_info (older engines: GET /get_server_info) and returns true if they have a
// disaggregation_mode other than decode. It returns false if they have none.
func servesAlone(ctx context.Context, client *http.Client, engine string) bool {
	for _, path := range []string{"/server_info", "/get_server_info"} {
		var info struct {
			Mode *string `json:"disaggregation_mode"`
		}
		if readJSON(ctx, client, http.MethodGet, engine, path, nil, &info) == nil && info.Mode != nil {
			return *info.Mode != "decode"
		}
	}
	return false
}
