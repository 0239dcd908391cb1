// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
)

// A decode engine has one stream, as many as it may have: the next request is refused, and no engine hears of it.
func TestARequestIsRefusedWhenTheEnginesHaveEnough(t *testing.T) {
	g, p, d := startHTTP(t, "", "  admission: {mode: fixed, inFlightPerDecode: 1, queue: 0}\n")
	hold := d.holds()
	s := openStream(t, g)
	status, header, body := g.complete(`{"model":"m","prompt":"b"}`)
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.Equal(t, "overloaded", gjson.Get(body, "error.code").String(), body)
	assert.Equal(t, "1", header.Get("Retry-After"))
	assert.Equal(t, 1, p.count(), "nothing was sent")
	metrics := g.page("/metrics")
	assert.Contains(t, metrics, `pd_admission_refused_total{gen_ai_request_model="m",pd_reason="queue_full"} 1`)
	assert.Contains(t, metrics, `pd_admission_queued{gen_ai_request_model="m"} 0`)
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
	status, _, body = g.complete(`{"model":"m","prompt":"b"}`)
	assert.Equal(t, http.StatusOK, status, body)
}

func TestBytesInFlightAreBounded(t *testing.T) {
	g, p, d := startHTTP(t, ", maxBodyBytes: 60000, maxBytesInFlight: 100000, passthrough: decode", "")
	hold := d.holds()
	large := `{"model":"m","stream":true,"prompt":"` + strings.Repeat("a", 55_000) + `"}`
	s := g.stream("/v1/completions", large)
	for _, path := range []string{"/v1/completions", "/v1/embeddings"} {
		status, header, body := do(t, http.MethodPost, g.client+path, large)
		assert.Equal(t, http.StatusServiceUnavailable, status, path)
		assert.Equal(t, "overloaded", gjson.Get(body, "error.code").String(), body)
		assert.Equal(t, "1", header.Get("Retry-After"))
	}
	assert.Equal(t, 1, p.count()+d.count()-1, "nothing was sent")
	eventually(t, func() bool { // what the refused have read is given back after their responses
		metrics := g.page("/metrics")
		return strings.Contains(metrics, "pd_bytes_refused_total 2") &&
			regexp.MustCompile(`pd_bytes_in_flight 55\d\d\d\n`).MatchString(metrics)
	})
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
	status, _, body := do(t, http.MethodPost, g.client+"/v1/embeddings", large)
	assert.Equal(t, http.StatusOK, status, body)
}

func TestTheBudgetOfBytesHoldsTheLargestBody(t *testing.T) {
	for most, good := range map[string]bool{"1000": false, "2200": false, "2286": true} {
		_, err := parse("c.yaml", []byte(gatewayYAML(", maxBodyBytes: 2000, maxBytesInFlight: "+most)+modelYAML("")))
		if good {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, "less than maxBodyBytes")
		}
	}
	cfg := mustParse(t, gatewayYAML(", maxBodyBytes: 2147483648")+modelYAML(""))
	assert.GreaterOrEqual(t, cfg.gateway.bytesInFlight()*7/8, int64(2<<30))
}
