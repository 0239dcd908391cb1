// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// announcing is a ModelServer whose engines announce themselves.
func announcing(model, connector, registration string) string {
	return serverYAML(model, "  kvConnector: {type: "+connector+"}\n  discovery: {registration: {"+registration+"}}\n")
}

// announceLine says where they do, by ZeroMQ and by HTTP.
var announceLine = regexp.MustCompile(`msg="engines may announce themselves"(?: listen=(\S+))?(?: http=(\S+))?`)

// api is the URL of the engines that have announced themselves.
func (p *program) api() string {
	m := announceLine.FindStringSubmatch(p.log.String())
	require.NotNil(p.t, m, "%s", p.log)
	return "http://" + m[2] + "/v1/endpoints"
}

// register announces an engine for an hour, and returns the status of the response.
func (p *program) register(id, url, role string, more attributes, header ...string) int {
	p.t.Helper()
	body, err := json.Marshal(map[string]any{"id": id, "url": url, "role": role, "leaseSeconds": 3600,
		"attributes": more})
	require.NoError(p.t, err)
	status, _, _ := do(p.t, http.MethodPost, p.api(), string(body), header...)
	return status
}

func TestEnginesRegisterByHTTP(t *testing.T) {
	pe, de := newEngine(t, "m"), newEngine(t, "m")
	p := start(t, gatewayYAML("")+announcing("m", "http", "http: 127.0.0.1:"+unusedPort(t)))
	api := p.api()
	status, _ := p.ready()
	assert.Equal(t, http.StatusServiceUnavailable, status)
	require.Equal(t, http.StatusCreated, p.register("prefill", pe.URL, "prefill", nil))
	require.Equal(t, http.StatusCreated, p.register("decode", de.URL, "decode", nil))
	serves := func(want int) {
		t.Helper()
		p.becomes(want)
		status, _, response := p.complete(`{"model":"m","prompt":"x"}`)
		assert.Equal(t, want, status, response)
	}
	serves(http.StatusOK)
	assert.Positive(t, pe.count())

	status, _, _ = do(t, http.MethodPost, api+"/decode/drain", "")
	assert.Equal(t, http.StatusOK, status)
	serves(http.StatusServiceUnavailable)
	assert.Equal(t, http.StatusOK, p.register("decode", de.URL, "both", nil))
	serves(http.StatusOK)

	// The clients' side and the operators' know nothing of it.
	for _, side := range []string{p.client, p.admin} {
		status, _, _ = do(t, http.MethodGet, side+"/v1/endpoints", "")
		assert.Equal(t, http.StatusNotFound, status)
	}
	address := strings.Split(api, "/")[2]
	p.signal()
	p.ended(exitOK)
	isFree(t, address, "the listener ends with the gateway")
}

// ping is a message of P2pNccl's engines, on a connection that stays until the test ends.
func ping(t *testing.T, address, kind string, e *engine) {
	t.Helper()
	pack := func(s string) string { return string([]byte{0xd9, byte(len(s))}) + s }
	message := "\x83" + pack("type") + pack(kind) + pack("http_address") + pack(strings.TrimPrefix(e.URL, "http://")) +
		pack("zmq_address") + pack("127.0.0.1:2100"+kind[:1])
	message = strings.NewReplacer("2100P", "21001", "2100D", "21002").Replace(message)
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = io.WriteString(conn, "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x00NULL"+string(make([]byte, 48))+
		"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"+string([]byte{0, byte(len(message))})+message)
	require.NoError(t, err)
}

func TestEnginesAnnounceThemselvesByZeroMQ(t *testing.T) {
	pe, de := newEngine(t, "m"), newEngine(t, "m")
	p := start(t, gatewayYAML("")+announcing("m", "p2pnccl", "listen: 127.0.0.1:0"))
	zmq := announceLine.FindStringSubmatch(p.log.String())[1]
	ping(t, zmq, "P", pe)
	ping(t, zmq, "D", de)
	p.becomes(http.StatusOK)
	status, _, response := p.complete(`{"model":"m","prompt":"x"}`)
	require.Equal(t, http.StatusOK, status, response)
	id := de.last().header.Get("X-Request-Id")
	assert.Regexp(t, `^___prefill_addr_127\.0\.0\.1:21001___decode_addr_127\.0\.0\.1:21002_[0-9a-f]{32}$`, id)
	assert.Equal(t, id, pe.last().header.Get("X-Request-Id"))
}

// A client of the gateway must not be able to register an engine.
func TestRegistrationHasAddressesOfItsOwn(t *testing.T) {
	for rule, k := range map[string]struct{ yaml, want string }{
		"one that is free": {gatewayYAML("") + announcing("m", "http", "http: 127.0.0.1:8000"), ""},
		"their default": {announcing("m", "http", "http: 127.0.0.1:8000"),
			"spec.discovery.registration.http: is the address of the Gateway's listen too"},
		"the operators'": {announcing("m", "http", `listen: ":9000"`),
			"spec.discovery.registration.listen: is the address of the Gateway's admin too"},
		"both of one": {announcing("m", "http", "listen: 127.0.0.1:30001, http: 127.0.0.1:30001"),
			"http: is the address of spec.discovery.registration.listen on line 6 too"},
		"another model's": {announcing("m", "http", "listen: 127.0.0.1:30001") +
			announcing("n", "http", "listen: 0.0.0.0:30001"),
			"is the address of spec.discovery.registration.listen on line"},
		"no other's": {announcing("m", "http", "listen: 127.0.0.1:30001") +
			announcing("n", "http", "listen: 127.0.0.1:30002"), ""},
	} {
		_, err := parse("config.yaml", []byte(k.yaml))
		if k.want == "" {
			assert.NoError(t, err, rule)
		} else {
			assert.ErrorContains(t, err, k.want, rule)
		}
	}
}
