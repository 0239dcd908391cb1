// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/ascendlayerwise"
	"github.com/pdkit/pdkit/connector/passthrough"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

func TestLaunchSettings(t *testing.T) {
	endpoint := func(url string, role discovery.Role, attributes map[string]string) discovery.Endpoint {
		e, err := discovery.New(url, role)
		require.NoError(t, err)
		e.Attributes = attributes
		return e
	}
	p := endpoint("http://10.0.0.5:8100", discovery.RolePrefill, map[string]string{"tpSize": "8"})
	d := endpoint("http://10.0.0.6:8200", discovery.RoleDecode, map[string]string{"tpSize": "4"})
	engines := []discovery.Endpoint{p, d}
	c, err := ascendlayerwise.New(&ascendlayerwise.Options{KVPort: 36000})
	require.NoError(t, err)

	out, err := c.Render(connector.Target{Endpoint: p, Engines: engines})
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_producer","kv_port":36000,"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":4}}}`, out.KVTransfer.JSON())
	out, err = c.Render(connector.Target{Endpoint: d, Engines: engines})
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_consumer","kv_port":36100,"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":4}}}`, out.KVTransfer.JSON())
	var warned bool
	for _, n := range out.Notes {
		warned = warned || n.Path == "config.callbackURL" && strings.Contains(n.Text, "loopback")
	}
	assert.True(t, warned, "D on another host cannot reach 127.0.0.1")

	out, err = c.Render(connector.Target{Endpoint: endpoint("http://10.0.0.7:8300", discovery.RoleBoth, nil)})
	require.NoError(t, err)
	assert.Nil(t, out.KVTransfer)
	faults := connector.FieldErrors(c.CheckEndpoint(endpoint("http://d:1", discovery.RoleDecode, map[string]string{"kvPort": "x"})))
	require.Len(t, faults, 1)
	assert.Equal(t, "attributes.kvPort", faults[0].Path)
}

// BenchmarkLegs describes both legs of a chat of 2 KiB, against passthrough. The budget over that is 5 µs and 10 allocations a leg.
func BenchmarkLegs(b *testing.B) {
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 390) + `"}],"max_tokens":64,"stream":true}`
	plain, err := passthrough.New(nil)
	require.NoError(b, err)
	layerwise, err := ascendlayerwise.New(nil)
	require.NoError(b, err)
	for _, c := range []connector.KVConnector{plain, layerwise} {
		b.Run(c.Name(), func(b *testing.B) {
			s := session(b, connector.APIChat, body)
			s.SetEvent(connector.Event{Body: []byte(callback("chatcmpl-" + s.ID)), At: time.Now()})
			ctx := context.Background()
			var out jsonedit.Segments
			b.ReportAllocs()
			for b.Loop() {
				leg := connector.NewLeg(s.Request)
				if c.Prefill(ctx, s, leg) != nil || leg.Splice(&out) != nil {
					b.Fatal("prefill")
				}
				out.Reset()
				leg = connector.NewLeg(s.Request)
				if c.Decode(ctx, s, nil, leg) != nil || leg.Splice(&out) != nil {
					b.Fatal("decode")
				}
				out.Reset()
			}
		})
	}
}
