// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"time"

	wire "github.com/miekg/dns"
)

// UseConf has the system's servers read from another file, and asked at another port.
func (s *Source) UseConf(path, port string) { s.conf, s.confPort = path, port }

// TellEvery sets the least time between two errors.
func (s *Source) TellEvery(d time.Duration) { s.tellEvery = d }

// Next returns the time of the next round. It is called after Watch has returned.
func (s *Source) Next() time.Time { return s.next }

// Read exposes the reading of one message: how many addresses and services it has, and the alias it leads to.
func Read(m *wire.Msg, name string, kind uint16) (addrs, services int, alias string, err error) {
	a, err := read(m, name, kind)
	return len(a.addrs), len(a.services), a.alias, err
}
