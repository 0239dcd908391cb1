// SPDX-License-Identifier: Apache-2.0

package launcher_test

import (
	"fmt"

	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/launcher"
	"github.com/pdkit/pdkit/discovery"
)

// ticket is a connector; its other methods are left out.
type ticket struct{}

func (ticket) LaunchSettings(e discovery.Endpoint) (launcher.Settings, error) {
	port, err := attr.Text(e, "ticketPort")
	if err != nil {
		return launcher.Settings{}, err
	}
	return launcher.Settings{Args: []string{"--ticket-port", port}}, nil
}

// pdctl render writes these arguments into the engine's command line.
func ExampleLauncher() {
	var l launcher.Launcher = ticket{}
	s, err := l.LaunchSettings(discovery.Endpoint{Attributes: map[string]string{"ticketPort": "7000"}})
	fmt.Println(s.Args, err)
	// Output: [--ticket-port 7000] <nil>
}
