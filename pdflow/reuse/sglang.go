// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
)

// servesAlone reports whether an engine of SGLang says of itself that it does not wait for another's KV: its server
// arguments, which GET /server_info tells (older ones: GET /get_server_info), have another disaggregation_mode than
// decode. Such an engine answers a decode leg with the right text, which proves nothing. One that tells no mode is
// believed.
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
		err = json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&info)
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK && err == nil && info.Mode != nil {
			return *info.Mode != "decode"
		}
	}
	return false
}
