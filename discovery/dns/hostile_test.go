// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"fmt"
	"testing"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/discovery/dns"
)

// Two messages of 40 KB listed 1.7 million engines: each port of a target at each of its addresses.
func TestANameWithTooManyEnginesKeepsItsList(t *testing.T) {
	small := []string{"prefill.test. 0 IN SRV 0 0 8000 p.test.", "decode.test. 0 IN SRV 0 0 8000 d.test.",
		"p.test. 0 IN A 127.0.0.1", "d.test. 0 IN A 127.0.0.2"}
	s := serve(t, small...)
	w := watchQuick(t, s, func(o *dns.Options) { o.Port = 0 })
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	large := append([]string(nil), small...)
	for i := range 1300 {
		large = append(large, fmt.Sprintf("prefill.test. 0 IN SRV 0 0 %d p.test.", 9000+i),
			fmt.Sprintf("p.test. 0 IN A 127.1.%d.%d", i/200, i%200+1))
	}
	s.twistWith(alters(func(m *wire.Msg) { m.Compress = true }))
	s.set(large...)
	w.tells("prefill: the name has more than 10000 engines (the last list stays)")
	// a round during the change may have got one port, at all addresses
	assert.LessOrEqual(t, len(w.set.Load().Endpoints), 1302)
	s.set(small...)
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
}
