// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"encoding/json"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/relay"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	relayed   = `{"peer":"10.0.0.5:9000","blocks":[1,2,3],"note":null}`
	tpuParams = `{"uuid":1043467854563345,"remote_block_ids":[7,8,9],"remote_host":"10.0.0.5","remote_port":"9100"}`
)

func harnesses() map[string]connectortest.Harness {
	response := func(params string) func(*connector.Session, []byte) connectortest.Response {
		return func(*connector.Session, []byte) connectortest.Response {
			return connectortest.Response{Handoff: params}
		}
	}
	bad := func(list ...string) (raw []json.RawMessage) {
		for _, s := range list {
			raw = append(raw, json.RawMessage(s))
		}
		return raw
	}
	return map[string]connectortest.Harness{
		"a member": {
			Name: relay.Name, Needs: []string{"peer", "blocks"}, Response: response(relayed),
			Config: json.RawMessage(`{"member":"engine.transfer","required":{"peer":"string","blocks":"list"},` +
				`"prefill":{"do_remote_decode":true},"endsByLength":true,"leaseDuration":"20s",` +
				`"kv_connector":"HouseConnector","kv_connector_module_path":"house.connector",` +
				`"kv_connector_extra_config":{"port":7000}}`),
			BadConfig: bad(
				`{"member":"messages"}`, `{"member":"a..b"}`, `{"member":"a b"}`, `{"member":"a.b.c.d.e.f.g.h.i"}`,
				`{"member":"sampling_params"}`, `{"required":{"":"list"}}`, `{"required":{"a":"lists"}}`,
				`{"prefill":[]}`,
				`{"prefill":{"a":1,"a":2}}`, `{"leaseDuration":"0s"}`, `{"header":"Content-Length"}`,
				`{"header":"X Ticket"}`, `{"header":"X-Request-Id"}`, `{"header":"X-T","required":{"a":"list"}}`,
				`{"header":"X-T","passEmpty":true}`, `{"header":"X-T","prefill":{}}`,
				`{"kv_connector_module_path":"x"}`, `{"kv_connector_extra_config":{}}`, `{"keys":["a"]}`,
				`{"member":"`+strings.Repeat("a", 129)+`"}`,
			),
		},
		"a header": {
			Name: relay.Name, Response: response("t-17"),
			Config: json.RawMessage(`{"header":"X-KV-Ticket","kv_connector":"TicketConnector","leaseDuration":"20s"}`),
		},
		"from a header into a member": {
			Name: relay.Name, Response: response("t-17"),
			Config: json.RawMessage(`{"header":"X-KV-Ticket","member":"sampling_params.extra.ticket",` +
				`"kv_connector":"TicketConnector"}`),
		},
		"TPUConnector": {
			Name: relay.TPUName, Response: response(tpuParams),
			Needs:  []string{"uuid", "remote_block_ids", "remote_host"}, // a port may be a number, too
			Config: json.RawMessage(`{"leaseDuration":"90s","transferPort":9200,"noticePort":9700}`),
			BadConfig: bad(`{"leaseDuration":"0s"}`, `{"leaseDuration":"1500ms"}`, `{"transferPort":65536}`,
				`{"noticePort":-1}`),
			Except: connectortest.Exceptions{PassesEmpty: true},
			BadResponses: []connectortest.Response{
				{Handoff: strings.Replace(tpuParams, `,"remote_port":"9100"`, ``, 1)},
				{Handoff: strings.Replace(tpuParams, `"9100"`, `null`, 1)},
				{Handoff: strings.Replace(tpuParams, `"9100"`, `"0"`, 1)},
				{Handoff: strings.Replace(tpuParams, `"9100"`, `"x"`, 1)},
				{Handoff: strings.Replace(tpuParams, `"9100"`, `["9100"]`, 1)},
				{Handoff: strings.Replace(tpuParams, `"10.0.0.5"`, `["10.0.0.5","10.0.0.6"]`, 1)},
				{Handoff: strings.Replace(tpuParams, `[7,8,9]`, `[[],[]]`, 1)},
				{Handoff: strings.Replace(tpuParams, `1043467854563345`, `"1"`, 1)},
			},
		},
	}
}

func TestConformance(t *testing.T) {
	for name, h := range harnesses() {
		t.Run(name, func(t *testing.T) { connectortest.Run(t, h) })
	}
}

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(relay.Name), "testdata/golden")
	connectortest.Golden(t, connectortest.Open(relay.TPUName), "testdata/tpu")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harnesses()["a member"]) }

func FuzzTPU(f *testing.F) { connectortest.Fuzz(f, harnesses()["TPUConnector"]) }
