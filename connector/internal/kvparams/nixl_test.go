// SPDX-License-Identifier: Apache-2.0

package kvparams_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/connector/internal/kvparams"
)

const good = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e",` +
	`"remote_request_id":"r","remote_host":"h","remote_port":1}`

// The tests of connector/nixl check every key of a handoff through this package. This test checks the flag.
func TestTheFlagSaysWhichWay(t *testing.T) {
	back := strings.NewReplacer("true", "false", "false", "true").Replace(good)
	require.NoError(t, kvparams.NIXL([]byte(good), kvparams.RemotePrefill))
	require.NoError(t, kvparams.NIXL([]byte(back), kvparams.RemoteDecode))
	require.Error(t, kvparams.NIXL([]byte(good), kvparams.RemoteDecode),
		"P must not take the KV of a prompt from whoever is to take it from P")
	require.Error(t, kvparams.NIXL([]byte(back), kvparams.RemotePrefill),
		"D hangs on it (docs/protocols/nixl.md, recording 39)")
}

func TestAConnectorsOwnRuleComesLast(t *testing.T) {
	check := func(raw string) (seen string, err error) {
		o := handoff.Read([]byte(raw), kvparams.Blocks)
		kvparams.CheckNIXL(o, kvparams.RemotePrefill)
		seen = string(o.Text("remote_engine_id"))
		o.Fault("own", "rule")
		return seen, o.Close()
	}
	seen, err := check(good)
	require.EqualError(t, err, "own rule")
	assert.Equal(t, `"e"`, seen)
	_, err = check(`{}`)
	require.Error(t, err)
	assert.NotEqual(t, "own rule", err.Error(), "the first fault counts")
}
