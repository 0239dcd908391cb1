// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector"
)

// Where the legs' id holds addresses, responses hold the client's id, streamed and not: engines make the id of a
// response of the header.
func TestClientsSeeNoAddresses(t *testing.T) {
	for _, c := range protocols {
		if c.connector != "p2pnccl" && c.connector != "moriio" {
			continue
		}
		t.Run(c.title(), func(t *testing.T) {
			x := c.start(t)
			for i, stream := range []bool{false, true} {
				for _, api := range append([]connector.API{connector.APICompletions}, c.apis...) {
					status, h, response := do(t, http.MethodPost, x.gateway.client+api.Path(), body(api, 900+i, stream),
						"X-Request-Id", "client-7")
					assert.Equal(t, http.StatusOK, status, response)
					assert.Equal(t, "client-7", h.Get("X-Request-Id"))
					assert.NotContains(t, response, "_addr_", api)
					assert.NotContains(t, response, "127.0.0.1", api)
					if api == connector.APICompletions {
						assert.Contains(t, response, `cmpl-client-7`)
					}
				}
			}
		})
	}
}
