// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const announcedYAML = `apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
spec:
  model: m
  kvConnector: {type: %s}
  discovery: {registration: {%s}}
---
`

var announceLine = regexp.MustCompile(`msg="engines may announce themselves"(?: listen=(\S+))?(?: http=(\S+))? model=m`)

// announcing starts a gateway, and returns where engines announce themselves.
func announcing(t *testing.T, connector, registration string) (p *program, zmq, api string) {
	t.Helper()
	p = start(t, gatewayYAML("")+fmt.Sprintf(announcedYAML, connector, registration))
	m := announceLine.FindStringSubmatch(p.log.String())
	require.NotNil(t, m, "%s", p.log)
	return p, m[1], "http://" + m[2]
}

func TestEnginesRegisterByHTTP(t *testing.T) {
	pe, de := newEngine(t, "m"), newEngine(t, "m")
	p, _, api := announcing(t, "http", "http: 127.0.0.1:"+unusedPort(t))
	status, _, _ := do(t, http.MethodGet, p.admin+"/readyz", "")
	assert.Equal(t, http.StatusServiceUnavailable, status)
	for _, e := range [][2]string{{pe.URL, "prefill"}, {de.URL, "decode"}} {
		status, _, response := do(t, http.MethodPost, api+"/v1/endpoints",
			fmt.Sprintf(`{"id": %q, "url": %q, "role": %q, "leaseSeconds": 3600}`, e[1], e[0], e[1]))
		require.Equal(t, http.StatusCreated, status, response)
	}
	serves := func(want int) {
		t.Helper()
		require.Eventually(t, func() bool {
			status, _, _ := do(t, http.MethodGet, p.admin+"/readyz", "")
			return status == want
		}, 20*time.Second, 5*time.Millisecond)
		status, _, response := do(t, http.MethodPost, p.client+"/v1/completions", `{"model":"m","prompt":"x"}`)
		assert.Equal(t, want, status, response)
	}
	serves(http.StatusOK)
	assert.Positive(t, pe.count())

	status, _, _ = do(t, http.MethodPost, api+"/v1/endpoints/decode/drain", "")
	assert.Equal(t, http.StatusOK, status)
	serves(http.StatusServiceUnavailable)
	status, _, _ = do(t, http.MethodPost, api+"/v1/endpoints",
		fmt.Sprintf(`{"id": "decode", "url": %q, "role": "both", "leaseSeconds": 3600}`, de.URL))
	assert.Equal(t, http.StatusOK, status)
	serves(http.StatusOK)

	// The clients' side and the operators' know nothing of it.
	for _, side := range []string{p.client, p.admin} {
		status, _, _ = do(t, http.MethodGet, side+"/v1/endpoints", "")
		assert.Equal(t, http.StatusNotFound, status)
	}
	address := strings.TrimPrefix(api, "http://")
	p.signal()
	p.ended(exitOK)
	require.Eventually(t, func() bool {
		ln, err := net.Listen("tcp", address)
		return err == nil && ln.Close() == nil
	}, 20*time.Second, 10*time.Millisecond, "the listener ends with the gateway")
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
	p, zmq, _ := announcing(t, "p2pnccl", "listen: 127.0.0.1:0")
	ping(t, zmq, "P", pe)
	ping(t, zmq, "D", de)
	require.Eventually(t, func() bool {
		status, _, _ := do(t, http.MethodGet, p.admin+"/readyz", "")
		return status == http.StatusOK
	}, 20*time.Second, 5*time.Millisecond, "%s", p.log)
	status, _, response := do(t, http.MethodPost, p.client+"/v1/completions", `{"model":"m","prompt":"x"}`)
	require.Equal(t, http.StatusOK, status, response)
	id := de.last().header.Get("X-Request-Id")
	assert.Regexp(t, `^___prefill_addr_127\.0\.0\.1:21001___decode_addr_127\.0\.0\.1:21002_[0-9a-f]{32}$`, id)
	assert.Equal(t, id, pe.last().header.Get("X-Request-Id"))
}

func TestARegistrationAddressThatIsTaken(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	log := &logBuffer{}
	yaml := gatewayYAML("") + fmt.Sprintf(announcedYAML, "http", "listen: 127.0.0.1:0, http: "+ln.Addr().String())
	assert.Equal(t, exitFailed, run([]string{"-config", write(t, yaml)}, log, log, nil))
	assert.Contains(t, log.String(), "cannot listen for HTTP")
}

// A client of the gateway must not be able to register an engine.
func TestRegistrationHasAddressesOfItsOwn(t *testing.T) {
	other := strings.Replace(announcedYAML, "model: m", "model: n", 1)
	for rule, k := range map[string]struct{ yaml, want string }{
		"one that is free": {gatewayYAML("") + fmt.Sprintf(announcedYAML, "http", "http: 127.0.0.1:8000"), ""},
		"their default": {fmt.Sprintf(announcedYAML, "http", "http: 127.0.0.1:8000"),
			"spec.discovery.registration.http: is the address of the Gateway's listen too"},
		"the operators'": {fmt.Sprintf(announcedYAML, "http", `listen: ":9000"`),
			"spec.discovery.registration.listen: is the address of the Gateway's admin too"},
		"both of one": {fmt.Sprintf(announcedYAML, "http", "listen: 127.0.0.1:30001, http: 127.0.0.1:30001"),
			"http: is the address of spec.discovery.registration.listen on line 6 too"},
		"another model's": {fmt.Sprintf(announcedYAML, "http", "listen: 127.0.0.1:30001") +
			fmt.Sprintf(other, "http", "listen: 0.0.0.0:30001"),
			"is the address of spec.discovery.registration.listen on line"},
		"no other's": {fmt.Sprintf(announcedYAML, "http", "listen: 127.0.0.1:30001") +
			fmt.Sprintf(other, "http", "listen: 127.0.0.1:30002"), ""},
	} {
		_, err := load(write(t, k.yaml))
		if k.want == "" {
			assert.NoError(t, err, rule)
		} else {
			assert.ErrorContains(t, err, k.want, rule)
		}
	}
}
