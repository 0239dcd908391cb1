// SPDX-License-Identifier: Apache-2.0

package moriio

import (
	"encoding/json"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// transferPrefix begins every transfer id. Engines recognize their notices by it.
const transferPrefix = "tx-"

func isTransferID(raw []byte, s *connector.Session) bool {
	return string(raw) == `"`+transferPrefix+s.UUID()+`"`
}

// params writes a leg's kv_transfer_params.
type params struct{ b []byte }

// newParams begins with head, which ends inside the string of the transfer id.
func newParams(head string, s *connector.Session) *params {
	p := &params{b: make([]byte, 0, 512)}
	p.b = append(append(append(append(p.b, head...), transferPrefix...), s.UUID()...), '"')
	return p
}

func (p *params) text(s string) { p.b = append(p.b, s...) }

func (p *params) key(name string) { p.b = append(append(append(p.b, `,"`...), name...), `":`...) }

func (p *params) raw(name string, raw []byte) {
	p.key(name)
	p.b = append(p.b, raw...)
}

func (p *params) number(name string, n int) {
	p.key(name)
	p.b = strconv.AppendInt(p.b, int64(n), 10)
}

// peer tells an engine about the other one. It writes both spellings of the tensor-parallel size, since different
// releases read different ones. It leaves out a size that is not configured; the engine then takes its own. If the
// engine has several pods, remote_hosts names them, and rank n is in pod n / remote_dp_size_local.
func (p *params) peer(e *engine) {
	p.key("remote_host")
	p.b = append(append(append(p.b, '"'), e.host...), '"') // the host is checked: it needs no escapes
	p.number("remote_handshake_port", e.ports.handshake)
	p.number("remote_notify_port", e.ports.notify)
	p.number("remote_dp_size", e.dp)
	if len(e.pods) > 0 {
		p.raw("remote_hosts", []byte(`["`+strings.Join(e.pods, `","`)+`"]`))
		p.number("remote_dp_size_local", e.local)
	}
	if e.tp > 0 {
		p.number("remote_tp_size", e.tp)
		p.number("tp_size", e.tp)
	}
}

func (p *params) end() json.RawMessage { return append(p.b, '}') }

// digits reads a number that was checked before.
func digits(raw []byte) int {
	n, _ := strconv.Atoi(string(raw))
	return n
}
