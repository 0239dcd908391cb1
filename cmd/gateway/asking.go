// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"net/http"
	"sync/atomic"

	"github.com/pdkit/pdkit/transport"
)

// asking sends what the gateway itself asks a model's engines: what they are, which adapters and KV they have, the
// tokens of prompts, health probes. A question has the key of -engine-key-file, if there is one. Clients' requests do
// not go this way: their key is the client's.
type asking struct {
	http.RoundTripper
	key  func() http.Header // nil: there is none
	log  *slog.Logger
	told atomic.Pointer[string] // the Authorization that engines refused, as was logged
}

func newAsking(engines http.RoundTripper, key func() http.Header, log *slog.Logger) *asking {
	a := &asking{RoundTripper: engines, key: key, log: log}
	if key != nil {
		a.RoundTripper = transport.WithHeader(engines, key)
	}
	return a
}

// RoundTrip logs once that engines want a key, or another one: once for each key.
func (a *asking) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := a.RoundTripper.RoundTrip(r)
	if err == nil && (resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden) {
		a.refused(r.URL.Path, resp.StatusCode)
	}
	return resp, err
}

// own is the header of synthetic probes, which go through flows as clients' requests do.
func (a *asking) own() http.Header {
	if a.key == nil {
		return nil
	}
	return a.key()
}

func (a *asking) refused(path string, status int) {
	now := a.own().Get("Authorization")
	if before := a.told.Swap(&now); before != nil && *before == now {
		return
	}
	if now == "" {
		a.log.Warn("engines want a key for what the gateway asks them: start the gateway with -engine-key-file",
			"path", path, "status", status)
		return
	}
	a.log.Warn("engines refuse the key of -engine-key-file for what the gateway asks them", "path", path, "status",
		status)
}
