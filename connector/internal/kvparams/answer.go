// SPDX-License-Identifier: Apache-2.0

package kvparams

import (
	"encoding/json"

	"github.com/pdkit/pdkit/connector"
)

// Ask are the parameters with which a prefill leg asks P to keep its blocks and to say where they are. Engines read only
// do_remote_decode; the nulls are what every proxy sends.
var Ask = json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)

// OfAnswer returns the parameters of P's answer, byte for byte, if check finds no fault with them. The error is
// [connector.ErrNoTransfer].
func OfAnswer(p *connector.PrefillResult, check func(raw json.RawMessage) error) (json.RawMessage, error) {
	if p == nil {
		return nil, connector.NoTransfer("decode was described before prefill answered")
	}
	if p.Err() != nil {
		return nil, connector.NoTransfer("the answer is not one JSON object")
	}
	raw, ok := p.Field(connector.ParamsMember)
	if !ok {
		return nil, connector.NoTransfer("kv_transfer_params is absent or null: prefill did not end as it must")
	}
	if err := check(raw); err != nil {
		return nil, connector.NoTransfer("kv_transfer_params: %v", err)
	}
	return raw, nil
}
