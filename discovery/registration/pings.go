// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"context"
	"time"

	"github.com/pdkit/pdkit/internal/zmtp"
)

// Limits of one connection. An engine has one connection and sends a message about itself every few seconds. A relay
// may announce several engines.
const (
	maxPerSecond  = 256
	maxPerRelay   = 64
	throttleEvery = time.Second
)

func (s *Source) openZMQ(ctx context.Context) (*zmtp.Listener, error) {
	return zmtp.Listen(ctx, s.opts.Listen, zmtp.Config{
		Socket: "ROUTER", Peers: []string{"DEALER"}, Peer: s.registry.listen,
		Refused: func() { s.registry.count(func(c *Counts) *int64 { return &c.Refused }) },
	})
}

// listen handles the messages of one connection. It reads at most maxPerSecond; further messages wait in the sender's
// buffers.
func (r *registry) listen(gone <-chan struct{}) func([]byte) bool {
	told := map[string]struct{}{}
	taken, since := 0, time.Now()
	return func(raw []byte) bool {
		if taken++; taken > maxPerSecond {
			pause(gone, throttleEvery-time.Since(since))
			taken, since = 1, time.Now()
		} else if time.Since(since) >= throttleEvery {
			taken, since = 1, time.Now()
		}
		p, ok := readAnnouncement(raw)
		if !ok {
			r.count(func(c *Counts) *int64 { return &c.Malformed })
			return false
		}
		if !p.hello {
			if _, known := told[p.endpoint.ID]; !known && len(told) >= maxPerRelay {
				r.prune(told)
			}
			if _, known := told[p.endpoint.ID]; !known && len(told) >= maxPerRelay {
				r.count(func(c *Counts) *int64 { return &c.Surplus })
				return true
			}
			told[p.endpoint.ID] = struct{}{}
		}
		r.ping(&p, gone)
		return true
	}
}

func pause(gone <-chan struct{}, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-gone:
	}
}
