// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
)

// A decode engine has one stream, as many as it may have: the next request is refused, and no engine hears of it.
func TestARequestIsRefusedWhenTheEnginesHaveEnough(t *testing.T) {
	p, d := newEngine(t, "m"), newEngine(t, "m")
	hold := make(chan struct{})
	d.set(func(e *engine) { e.hold = hold })
	g := start(t, gatewayYAML("")+pairYAML("m", p, d, "  admission: {mode: fixed, inFlightPerDecode: 1, queue: 0}\n"))
	ended := make(chan string)
	go func() {
		_, _, body := do(t, http.MethodPost, g.client+"/v1/completions", `{"model":"m","prompt":"a","stream":true}`)
		ended <- body
	}()
	require.Eventually(t, func() bool { return d.count() == 1 }, 20*time.Second, 5*time.Millisecond)
	status, header, body := do(t, http.MethodPost, g.client+"/v1/completions", `{"model":"m","prompt":"b"}`)
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.Equal(t, "overloaded", gjson.Get(body, "error.code").String(), body)
	assert.Equal(t, "1", header.Get("Retry-After"))
	assert.Equal(t, 1, p.count(), "nothing was sent")
	_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
	assert.Contains(t, metrics, `pd_admission_refused_total{gen_ai_request_model="m",pd_reason="queue_full"} 1`)
	assert.Contains(t, metrics, `pd_admission_queued{gen_ai_request_model="m"} 0`)
	close(hold)
	assert.Contains(t, <-ended, "[DONE]")
	status, _, body = do(t, http.MethodPost, g.client+"/v1/completions", `{"model":"m","prompt":"b"}`)
	assert.Equal(t, http.StatusOK, status, body)
}

// YAML's off is a word for some readers and a boolean for others.
func TestAdmissionCanBeTurnedOff(t *testing.T) {
	for _, off := range []string{"off", "false", `"off"`} {
		cfg := mustParse(t, modelYAML("  admission: {mode: "+off+"}\n"))
		assert.Nil(t, cfg.models[0].AdmitOptions(), off)
	}
}

func TestBytesInFlightAreBounded(t *testing.T) {
	p, d := newEngine(t, "m"), newEngine(t, "m")
	hold := make(chan struct{})
	d.set(func(e *engine) { e.hold = hold })
	g := start(t, gatewayYAML(", maxBodyBytes: 60000, maxBytesInFlight: 100000, passthrough: decode")+
		pairYAML("m", p, d, ""))
	large := `{"model":"m","stream":true,"prompt":"` + strings.Repeat("a", 55_000) + `"}`
	ended := make(chan string)
	go func() {
		_, _, body := do(t, http.MethodPost, g.client+"/v1/completions", large)
		ended <- body
	}()
	require.Eventually(t, func() bool { return d.count() == 1 }, 20*time.Second, 5*time.Millisecond)
	for _, path := range []string{"/v1/completions", "/v1/embeddings"} {
		status, header, body := do(t, http.MethodPost, g.client+path, large)
		assert.Equal(t, http.StatusServiceUnavailable, status, path)
		assert.Equal(t, "overloaded", gjson.Get(body, "error.code").String(), body)
		assert.Equal(t, "1", header.Get("Retry-After"))
	}
	assert.Equal(t, 1, p.count()+d.count()-1, "nothing was sent")
	_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
	assert.Contains(t, metrics, "pd_bytes_refused_total 2")
	assert.Regexp(t, `pd_bytes_in_flight 55\d\d\d\n`, metrics)
	close(hold)
	assert.Contains(t, <-ended, "[DONE]")
	status, _, body := do(t, http.MethodPost, g.client+"/v1/embeddings", large)
	assert.Equal(t, http.StatusOK, status, body)
}

func TestTheBudgetOfBytesHoldsTheLargestBody(t *testing.T) {
	_, err := parse("c.yaml", []byte(gatewayYAML(", maxBodyBytes: 2000, maxBytesInFlight: 1000")+modelYAML("")))
	require.ErrorContains(t, err, "spec.maxBytesInFlight: is less than maxBodyBytes")
	cfg := mustParse(t, gatewayYAML(", maxBodyBytes: 2147483648")+modelYAML(""))
	assert.GreaterOrEqual(t, cfg.gateway.bytesInFlight(), int64(2<<30))
}
