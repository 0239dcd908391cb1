// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"strconv"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/sglang"
	"github.com/pdkit/pdkit/discovery"
)

// renderSGLang gives the launch arguments of python -m sglang.launch_server
// (docs/advanced_features/pd_disaggregation.md and server_args.py, 0.5.x). An engine of the role both runs without
// disaggregation, since it must serve requests without a room.
func renderSGLang(c connector.KVConnector, o *sglang.Options, t Target) (Settings, error) {
	out := Settings{Engine: "sglang"}
	prefill := t.Endpoint.Role.Has(discovery.RolePrefill) && !t.Endpoint.Role.Has(discovery.RoleBoth)
	decode := t.Endpoint.Role.Has(discovery.RoleDecode) && !t.Endpoint.Role.Has(discovery.RoleBoth)
	switch {
	case prefill:
		if err := checkEndpoint(c, t.Endpoint); err != nil {
			return out, err
		}
		port, err := attr.Port(t.Endpoint, "bootstrapPort", cmp.Or(o.BootstrapPort, sglang.DefaultBootstrapPort))
		if err != nil {
			return out, err
		}
		out.Args = append(out.Args, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port",
			strconv.Itoa(port))
		out.noteIf(t.Endpoint.Attribute("bootstrapHost") != "", "attributes.bootstrapHost",
			"the bootstrap server listens on the engine's --host, which must be an address that decode engines reach")
	case decode:
		out.Args = append(out.Args, "--disaggregation-mode", "decode")
	default:
		out.note("role", "serves requests alone: --disaggregation-mode stays null")
	}
	backend := o.TransferBackend
	switch {
	case prefill || decode:
		if backend == "" && t.CPU {
			backend = "mooncake_tcp"
		}
		out.Args = append(out.Args, "--disaggregation-transfer-backend", cmp.Or(backend, "mooncake"))
	case backend != "":
		out.idle("config.transferBackend", "an engine of the role both transfers nothing")
	}
	if n, err := attr.Int(t.Endpoint, "dpSize", 1, 1, 65535); err == nil && n > 1 {
		out.Args = append(out.Args, "--dp-size", strconv.Itoa(n), "--enable-dp-attention")
	}
	out.Args = append(out.Args, "--enable-metrics")
	out.noteIf(t.CPU, "cpu", "SGLang 0.5.23 moves KV between engines on CPUs only with its CUDA calls replaced "+
		"(docs/protocols/sglang.md)")
	out.idleIf(!prefill && o.BootstrapPort != 0, "config.bootstrapPort",
		"only prefill engines listen; a decode engine learns the port from each request")
	out.noteIf(o.PrefillCap != nil, "config.prefillCap",
		"pdkit's own: it limits the prefill leg, and engines have no setting for it")
	out.noLimits(t.Resources,
		"SGLang sends KV from one engine's memory to the other's; --mem-fraction-static sizes that")
	return out, nil
}
