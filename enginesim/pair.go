// SPDX-License-Identifier: Apache-2.0

package enginesim

import "errors"

// Pair starts a prefill engine and a decode engine that can pull its KV. Where the two configurations are silent, the
// roles and the connector are filled in, and the decode engine gets the prefill engine's model and block shape, since
// engines share KV only when they agree on these.
func Pair(prefill, decode Config) (p, d *Engine, err error) {
	setDefault(&prefill.KVRole, RoleProducer)
	setDefault(&decode.KVRole, RoleConsumer)
	setDefault(&decode.Model, prefill.Model)
	setDefault(&decode.Seed, prefill.Seed)
	setDefault(&decode.BlockSize, prefill.BlockSize)
	setDefault(&decode.BytesPerToken, prefill.BytesPerToken)
	setDefault(&decode.Blocks, prefill.Blocks)
	setDefault(&decode.MaxModelLen, prefill.MaxModelLen)
	if p, err = Start(prefill); err != nil {
		return nil, nil, err
	}
	if d, err = Start(decode); err != nil {
		return nil, nil, errors.Join(err, p.Close())
	}
	return p, d, nil
}
