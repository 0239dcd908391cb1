// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launcher"
	"github.com/pdkit/pdkit/discovery"
)

// elsewhere is a connector of another module, which brings its engines' settings.
type elsewhere struct {
	connector.KVConnector
	transfer string
}

func (elsewhere) Traits() connector.Traits { return connector.Traits{Name: "elsewhere"} }

func (c elsewhere) LaunchSettings(e discovery.Endpoint) (launcher.Settings, error) {
	if e.Attribute("ticketPort") == "" {
		return launcher.Settings{}, errors.New("ticketPort is missing")
	}
	s := launcher.Settings{Args: []string{"--ticket-port", e.Attribute("ticketPort")},
		Env: map[string]string{"TICKET_B": "2", "TICKET_A": "1"}}
	if c.transfer != "" {
		s.KVTransfer = json.RawMessage(c.transfer)
	}
	return s, nil
}

func TestAConnectorOfElsewhereBringsItsSettings(t *testing.T) {
	p := engine(t, "http://p:8000", discovery.RolePrefill, "ticketPort", "7000")
	deployment := launch.Deployment{Endpoints: []discovery.Endpoint{p}, Model: "m"}
	const transfer = `{"kv_connector":"TicketConnector","kv_role":"kv_producer",` +
		`"kv_connector_extra_config":{"blocks":12345678901}}`
	plan, err := launch.With(elsewhere{transfer: transfer}, deployment)
	require.NoError(t, err)
	s := plan.Engines[0].Settings
	assert.Equal(t, "vllm", s.Engine)
	assert.Equal(t, []string{"--ticket-port", "7000"}, s.Args)
	assert.Equal(t, []launch.EnvVar{{Name: "TICKET_A", Value: "1"}, {Name: "TICKET_B", Value: "2"}}, s.Env,
		"in one order")
	assert.JSONEq(t, transfer, s.KVTransfer.JSON())

	_, err = launch.With(elsewhere{transfer: `{"kv_connector":"T","kv_roll":"kv_both"}`}, deployment)
	faults := config.FieldErrors(err)
	require.Len(t, faults, 1)
	assert.Equal(t, "kv_transfer_config.kv_roll", faults[0].Path)
	p.Attributes = nil
	_, err = launch.Render(elsewhere{}, nil, launch.Target{Endpoint: p})
	require.ErrorContains(t, err, "ticketPort is missing")
}

func TestARegisteredFunctionIsAskedFirst(t *testing.T) {
	assert.Panics(t, func() { launch.Register("nixl", nil) }, "the name is taken")
	_, err := launch.Render(silent{}, nil, launch.Target{})
	require.ErrorIs(t, err, launch.ErrNoSettings)
	require.ErrorContains(t, err, "silent")
	_, err = launch.Render(open(t, "nixl", ``).KVConnector, json.RawMessage(`{"port":"x"}`), launch.Target{})
	require.Len(t, config.FieldErrors(err), 1, "the settings are not those that the connector was made of")
}
