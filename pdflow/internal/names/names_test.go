// SPDX-License-Identifier: Apache-2.0

package names_test

import (
	"net/url"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/internal/names"
)

func TestNamesOfEngines(t *testing.T) {
	s := &discovery.Snapshot{Endpoints: []discovery.Endpoint{
		{ID: "llm/Prefill-0", URL: &url.URL{Host: "10.0.0.7:8000"}, Node: "gpu-3", Zone: "zone-a", Group: "blue",
			Attributes: map[string]string{"engineID": "p0, p1", "sideChannelHost": "side", "dpSize": "8",
				"kvEvents": "tcp://events:5557", "zmqAddress": "zmq.llm:9000", "mode": "write"}},
		{ID: "7", URL: &url.URL{Host: "decode_1:8000"}},
		{ID: "a/7/decode", URL: &url.URL{Host: "[fd00::b]:80"}},
	}}
	var x names.Index
	for _, name := range []string{"llm/prefill-0", "prefill-0", "gpu-3", "p0", "p1", "side", "events", "zmq.llm",
		"decode_1", "fd00::b", "a/7/decode"} {
		assert.True(t, x.Has(s, name), name)
	}
	for _, word := range []string{"", "llm", "zone-a", "blue", "8", "7", "write", "decode", "10.0.0.7"} {
		assert.False(t, x.Has(s, word), word)
	}
	assert.False(t, x.Has(&discovery.Snapshot{}, "prefill-0"), "a later list is another")
	assert.True(t, x.Has(s, "prefill-0"))
}
