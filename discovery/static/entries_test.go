// SPDX-License-Identifier: Apache-2.0

package static_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
)

func TestEntriesBecomeEndpoints(t *testing.T) {
	list, err := static.Endpoints([]static.Entry{
		{URL: "http://10.0.0.1:8000/base/", Role: "prefill", Group: "a", Zone: "z1",
			Attributes: map[string]string{"bootstrapPort": "8998"}},
		{URL: "https://[::1]", Role: "both"},
	})
	require.NoError(t, err)
	require.Len(t, list, 2)
	p := list[0]
	assert.Equal(t, []any{"10.0.0.1:8000/base", discovery.RolePrefill, "a", "z1", "8998"},
		[]any{p.ID, p.Role, p.Group, p.Zone, p.Attribute("bootstrapPort")})
	_, err = static.New(list...)
	assert.NoError(t, err)
}

func TestEveryFaultOfEveryEntryIsTold(t *testing.T) {
	list, err := static.Endpoints([]static.Entry{
		{URL: "http://good:1", Role: "both"},
		{URL: "hunter2:1", Role: "decod"},
		{},
		{URL: "http://GOOD:1/", Role: "decode"},
		{URL: "http://x", Role: "decode"},
		{URL: "https://x", Role: "decode"},
		{URL: "http://u:hunter2@x", Role: "prefill"},
	})
	assert.Len(t, list, 2, "those without a fault")
	var told []string
	for _, fe := range config.FieldErrors(err) {
		told = append(told, fe.Error())
	}
	assert.Equal(t, []string{
		"[1].role: is not a role; did you mean decode?",
		"[1].url: is not an engine's address (the scheme is not http or https); write http://HOST:PORT",
		"[2].role: is missing; write prefill, decode, both or encode",
		"[2].url: is missing; write http://HOST:PORT",
		"[3].url: is listed twice, first as [0]; list each engine once; one that serves both legs has role: both",
		"[5].url: has the name of engine [4], since neither has a port; write the ports",
		"[6].url: is not an engine's address (user info is not allowed in an engine's URL); write http://HOST:PORT",
	}, told)
	assert.NotContains(t, err.Error(), "hunter2")
}
