// SPDX-License-Identifier: Apache-2.0

package kubernetes

import "time"

// Hurry has definitions that are not there looked for at short intervals, and faults told at once.
func (m *ModelServers) Hurry() {
	m.absent, m.confirm, m.patience = 100*time.Millisecond, 10*time.Millisecond, 0
}

// ShortWatches has the server asked to end watches after a second or two.
func (m *ModelServers) ShortWatches() { m.length = time.Second }
