// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A decode engine that is silent in mid-stream, as with a parser that holds a call's arguments back, is waited for as
// long as it is well, and operators see it. One that is not well has its stream cut.
func TestASilentStreamGoesOnWhileItsEngineIsWell(t *testing.T) {
	for name, well := range map[string]bool{"well": true, "ill": false} {
		t.Run(name, func(t *testing.T) {
			g, _, d := startHTTP(t, "", "  kvConnector: {timeouts: {idle: 200ms}}\n")
			hold := d.holds()
			s := g.stream("/v1/completions", `{"model":"m","stream":true,"prompt":"a"}`)
			g.shows(`pd_silences_total{gen_ai_request_model="m",pd_connector="http",pd_result="well"}`)
			if !well {
				d.set(func(e *engine) { e.sick = true })
				g.shows(`pd_silences_total{gen_ai_request_model="m",pd_connector="http",pd_result="ill"} 1`)
				assert.Equal(t, "cut", s.rest(t))
				close(hold)
				return
			}
			eventually(t, func() bool { _, page := g.live(); return strings.Contains(page, `"silent":`) })
			close(hold)
			assert.Equal(t, "data: [DONE]", s.rest(t))
		})
	}
}
