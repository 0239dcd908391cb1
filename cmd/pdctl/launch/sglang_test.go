// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

func TestSGLangByRole(t *testing.T) {
	p := engine(t, "http://10.0.0.5:30000", discovery.RolePrefill,
		"bootstrapPort", "9001", "bootstrapHost", "p.example", "dpSize", "4")
	out := render(t, "sglang", `{"bootstrapPort":9000}`, launch.Target{Endpoint: p})
	assert.Equal(
		t, []string{"--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "9001",
			"--disaggregation-transfer-backend", "mooncake", "--dp-size", "4", "--enable-dp-attention",
			"--enable-metrics"}, out.Args,
	)
	require.Len(t, out.Notes, 1)
	assert.Equal(t, "attributes.bootstrapHost", out.Notes[0].Path, "the bootstrap server listens on --host")

	d := engine(t, "http://127.0.0.1:30001", discovery.RoleDecode)
	out = render(t, "sglang", ``, launch.Target{Endpoint: d})
	assert.Equal(
		t, []string{"--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake",
			"--enable-metrics"}, out.Args,
	)
	assert.Empty(t, out.Notes)

	both := engine(t, "http://127.0.0.1:30001", discovery.RoleBoth)
	out = render(t, "sglang", ``, launch.Target{Endpoint: both})
	assert.NotContains(t, out.Args, "--disaggregation-mode", "it must serve requests without a room")
}

// Each setting becomes a launch argument, or a note says that it has no effect.
func TestNoSettingOfSGLangIsDroppedInSilence(t *testing.T) {
	d := engine(t, "http://127.0.0.1:30001", discovery.RoleDecode)
	out := render(t, "sglang", `{"bootstrapPort":9000,"prefillCap":false}`,
		launch.Target{
			Endpoint: d, CPU: true, Resources: config.Resources{MaxMemory: "1Gi", MaxDisk: "1Gi",
				MaxBandwidth: "1Gi"},
		})
	var without, told []string
	for _, n := range out.Notes {
		assert.NotEmpty(t, n.Text)
		told = append(told, n.Path)
		if n.NoEffect {
			without = append(without, n.Path)
		}
	}
	assert.Contains(t, told, "config.prefillCap", "the gateway heeds it, engines have no setting for it")
	assert.Equal(
		t, []string{"config.bootstrapPort", "resources.maxMemory", "resources.maxDisk", "resources.maxBandwidth"},
		without,
	)
	assert.Empty(t, out.Env, "mooncake_tcp sets MC_FORCE_TCP itself")
}

func TestSGLangsTransferBackend(t *testing.T) {
	const flag = "--disaggregation-transfer-backend"
	for _, k := range []struct {
		config string
		cpu    bool
		want   string
	}{
		{``, false, "mooncake"},
		{``, true, "mooncake_tcp"},
		{`{"transferBackend":"mooncake_tcp"}`, false, "mooncake_tcp"},
		{`{"transferBackend":"nixl"}`, true, "nixl"},
	} {
		for _, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode} {
			args := render(t, "sglang", k.config, launch.Target{Endpoint: engine(t, "http://e:1", role),
				CPU: k.cpu}).Args
			at := slices.Index(args, flag)
			require.GreaterOrEqual(t, at, 0)
			assert.Equal(t, k.want, args[at+1])
		}
	}
	both := engine(t, "http://127.0.0.1:30001", discovery.RoleBoth)
	out := render(t, "sglang", `{"transferBackend":"nixl"}`, launch.Target{Endpoint: both})
	assert.NotContains(t, out.Args, flag)
	assert.Contains(t, out.Notes, launch.NoEffect("config.transferBackend", out.Notes[len(out.Notes)-1].Text))
}

func TestSGLangsFaultyAttributeIsNamed(t *testing.T) {
	_, err := open(t, "sglang", ``).Render(
		launch.Target{
			Endpoint: engine(t, "http://p:1", discovery.RolePrefill, "bootstrapPort", "x"),
		},
	)
	faults := config.FieldErrors(err)
	require.Len(t, faults, 1)
	assert.Equal(t, "attributes.bootstrapPort", faults[0].Path)
}
