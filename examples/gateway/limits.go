// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/pdkit/pdkit/connector"
)

// leaseOf is how long the connector's handoff lives, 0 where it does not expire.
func leaseOf(c connector.KVConnector) time.Duration {
	if l, ok := connector.As[connector.Leaser](c); ok {
		return l.Lease()
	}
	return 0
}

// olderDefaults are defaults that a connector's own settings carry: the design documents give the http connector a
// requestTimeout and maxRetries, which hold where timeouts.prefill and retry.maxAttempts are left out.
type olderDefaults interface {
	Defaults() (prefill time.Duration, attempts int)
}

// limits are the timeouts in effect. derived reports that Handoff follows from the lease.
func (o opened) limits() (limits connector.Limits, derived bool) {
	limits = o.spec.Timeouts.Resolve(leaseOf(o.connector))
	if c, ok := o.connector.(olderDefaults); ok && o.spec.Timeouts.Prefill == nil {
		if prefill, _ := c.Defaults(); prefill > 0 {
			limits.Prefill = prefill
		}
	}
	return limits, o.spec.Timeouts.Handoff == nil
}

// attempts are the attempts in effect.
func (o opened) attempts() connector.Attempts {
	a := o.spec.Retry.Resolve()
	if c, ok := o.connector.(olderDefaults); ok && o.spec.Retry.MaxAttempts == nil {
		if _, n := c.Defaults(); n > 0 {
			a.Max = n
		}
	}
	return a
}
