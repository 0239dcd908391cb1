// SPDX-License-Identifier: Apache-2.0

package modelserver

import "github.com/pdkit/pdkit/config"

// KeepAlive keeps balancers from cutting streams that have nothing to send: see pdflow.WithKeepAlive.
type KeepAlive struct {
	// after how much silence the client of a streamed request gets a comment, or a ping on /v1/messages, and the
	// response's head with the first
	After config.Duration `json:"after"`
}

func (m *ModelServer) checkKeepAlive() {
	if m.Has("spec.keepAlive") && m.Spec.KeepAlive.After <= 0 {
		m.fault("spec.keepAlive.after", "is not a time above 0", `write a time below what balancers wait, like "15s"; `+
			"without keepAlive it is off")
	}
}
