// SPDX-License-Identifier: Apache-2.0

package discovery_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
)

func TestParseURL(t *testing.T) {
	for raw, want := range map[string]string{
		"http://h:8000":       "http://h:8000",
		"https://h/base/":     "https://h/base",
		"http://[::1]:8000/":  "http://[::1]:8000",
		"http://h:8000/a/b//": "http://h:8000/a/b",
		"http://h/v1/engine":  "http://h/v1/engine",
		"http://h/api-v1":     "http://h/api-v1",
	} {
		u, err := discovery.ParseURL(raw)
		require.NoError(t, err, raw)
		assert.Equal(t, want, u.String())
	}
	for raw, want := range map[string]string{
		"h:8000":              `scheme "h"`,
		"":                    `scheme ""`,
		"//h:8000":            `scheme ""`,
		"unix:///run/s":       `scheme "unix"`,
		"http://":             "no host",
		"http://:8000":        "no host",
		"http://u:secret@h":   "user info",
		"http://h:99999":      "port",
		"http://h:":           "port",
		"http://h?key=secret": "query and fragment",
		"http://h?":           "query and fragment",
		"http://h#secret":     "query and fragment",
		"http://h:secret":     "not a URL",
		"http://h:0":          "port",
		"http://h/secret%0A":  "control characters",
		"http://h/secret%ff":  "control characters",
		"http://h/v1":         "the path ends in /v1, which each request adds itself",
		"http://h/secret/v1/": "ends in /v1,",
		"http://h/health":     "ends in /health",

		"http://h/secret/v1/chat/completions": "ends in /v1/chat/completions",
	} {
		_, err := discovery.ParseURL(raw)
		require.Error(t, err, raw)
		assert.Contains(t, err.Error(), want, raw)
		assert.NotContains(t, err.Error(), "secret")
	}
}

func TestNewNamesAnEndpointByItsAddress(t *testing.T) {
	e, err := discovery.New("http://[::1]:8000/base/", discovery.RolePrefill)
	require.NoError(t, err)
	assert.Equal(t, "[::1]:8000/base", e.ID)
	assert.Equal(t, "::1", e.Host())
	assert.Equal(t, discovery.PhaseReady, e.Phase)
	require.NoError(t, e.Validate())
	_, err = discovery.New("nowhere", discovery.RolePrefill)
	require.Error(t, err)
	assert.Empty(t, discovery.Endpoint{}.Host())
}

func TestRolesAreSets(t *testing.T) {
	assert.True(t, discovery.RoleBoth.Has(discovery.RolePrefill))
	assert.True(t, discovery.RoleBoth.Has(discovery.RoleBoth))
	assert.False(t, discovery.RolePrefill.Has(discovery.RoleBoth))
	assert.False(t, discovery.RoleBoth.Has(discovery.RoleEncode))
	assert.False(t, discovery.RoleBoth.Has(0), "no role is no wish that could be met")
}

func TestRolesAndPhasesHaveNames(t *testing.T) {
	for name, r := range map[string]discovery.Role{
		"prefill": discovery.RolePrefill, "decode": discovery.RoleDecode, "both": discovery.RoleBoth,
		"encode": discovery.RoleEncode,
	} {
		out, err := json.Marshal(r)
		require.NoError(t, err)
		assert.JSONEq(t, `"`+name+`"`, string(out))
		var back discovery.Role
		require.NoError(t, json.Unmarshal(out, &back))
		assert.Equal(t, r, back)
	}
	was := discovery.RoleDecode
	require.EqualError(t, was.UnmarshalText([]byte("Decode")),
		`role "Decode" is not one of prefill, decode, both, encode`)
	assert.Equal(t, discovery.RoleDecode, was, "a wrong name leaves the role")
	for name, p := range map[string]discovery.Phase{
		"ready": discovery.PhaseReady, "not-ready": discovery.PhaseNotReady, "draining": discovery.PhaseDraining,
		"phase(7)": 7,
	} {
		assert.Equal(t, name, p.String())
	}
}

func TestALoggedEndpointShowsNoAddressAndNoAttribute(t *testing.T) {
	e, err := discovery.New("http://10.1.2.3:8000", discovery.RoleDecode)
	require.NoError(t, err)
	e.ID, e.Attributes = "decode-0", map[string]string{"token": "secret"}
	var out bytes.Buffer
	slog.New(slog.NewTextHandler(&out, nil)).Info("x", "endpoint", e)
	assert.Contains(t, out.String(), "endpoint.id=decode-0 endpoint.role=decode endpoint.phase=ready")
	assert.NotContains(t, out.String(), "10.1.2.3")
	assert.NotContains(t, out.String(), "secret")
}
