// SPDX-License-Identifier: Apache-2.0

package p2pnccl_test

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/p2pnccl"
	"github.com/pdkit/pdkit/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var harness = connectortest.Harness{
	Name: p2pnccl.Name,
	Config: json.RawMessage(`{"kv_buffer_size":"8e9","kv_port":"21001","kv_ip":"10.0.1.2","proxy_ip":"10.0.1.1",` +
		`"proxy_port":"30009","http_port":"20001","send_type":"PUT","mem_pool_size_gb":8,"nccl_num_channels":16,` +
		`"send_wait_timeout":9,"recv_store_timeout":9}`),
	Prefill: discovery.Endpoint{Attributes: zmq("10.0.1.2:21001")},
	Decode:  discovery.Endpoint{Attributes: zmq("10.0.1.3:22001")},
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(p2pnccl.Name), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }

func zmq(address string) map[string]string { return map[string]string{"zmqAddress": address} }

func engine(t *testing.T, role discovery.Role, address string) discovery.Endpoint {
	return play.Engine(t, "http://10.0.1.9:20001", role, zmq(address))
}

func session(t *testing.T, api connector.API, body, p, d string) *connector.Session {
	return play.Session(t, api, body, zmq(p), zmq(d))
}

// These are the engines' own expressions (p2p_nccl_connector.py, parse_request_id): P finds D's address with one, D
// finds P's with the other.
var (
	findDecode  = regexp.MustCompile(`___decode_addr_(.*):(\d+)`)
	findPrefill = regexp.MustCompile(`___prefill_addr_(.*):(\d+)___`)
)

func TestEnginesFindEachOthersAddressInTheID(t *testing.T) {
	for p, d := range map[string]string{"10.0.1.2:21001": "10.0.1.3:22001", "p-0.engines:21001": "d-0.engines:22001",
		"[2001:db8::1]:21001": "[::1]:22001"} {
		s := session(t, connector.APICompletions, `{"prompt":"x"}`, p, d)
		id := "cmpl-" + play.Prefill(t, play.Open(t, p2pnccl.Name, ``), s).Header.Get("X-Request-Id") + "-0"
		assert.NotContains(t, id, "the-clients-id")
		assert.Equal(t, d, strings.Join(findDecode.FindStringSubmatch(id)[1:], ":"), "as P parses it")
		assert.Equal(t, p, strings.Join(findPrefill.FindStringSubmatch(id)[1:], ":"), "as D parses it")
	}
}

func TestAnAddressThatIsNotOneIsNotSent(t *testing.T) {
	c := play.Open(t, p2pnccl.Name, ``)
	for _, bad := range []string{"", "10.0.1.2", "10.0.1.2:0", "10.0.1.2:65536", "10.0.1.2:x", ":21001",
		"2001:db8::1:21001", "http://10.0.1.2:21001", "a b:1", "a\r\nX-Evil: 1:1", "x___decode_addr_1.2.3.4:5"} {
		for name, s := range map[string]*connector.Session{
			"P": session(t, connector.APIChat, `{"messages":[]}`, bad, "b:2"),
			"D": session(t, connector.APIChat, `{"messages":[]}`, "a:1", bad),
		} {
			var missing *attr.Error
			_, err := play.TryPrefill(c, s)
			require.ErrorAs(t, err, &missing, "%s of %s", bad, name)
			assert.Equal(t, "zmqAddress", missing.Attribute)
			_, err = play.TryDecode(c, s, nil)
			require.ErrorAs(t, err, &missing)
		}
		var fault *config.FieldError
		require.ErrorAs(t, check.Of(c).CheckEndpoint(engine(t, discovery.RoleDecode, bad)), &fault)
		assert.Equal(t, "attributes.zmqAddress", fault.Path)
	}
}

func TestSettings(t *testing.T) {
	play.Refuses(t, p2pnccl.Name, map[string]string{
		`{"kv_port":0}`: "kv_port", `{"kv_port":"x"}`: "kv_port", `{"kv_port":1.5}`: "kv_port",
		`{"http_port":65536}`: "http_port", `{"kv_buffer_size":"-1"}`: "kv_buffer_size",
		`{"kv_buffer_size":true}`: "kv_buffer_size", `{"kv_buffer_size":"1e999"}`: "kv_buffer_size",
		`{"send_type":"push"}`: "send_type … PUT_ASYNC", `{"proxy_port":"1"}`: "proxy_port … proxy_ip",
		`{"kvport":1}`: "kvport … did you mean kv_port",
	})
}
