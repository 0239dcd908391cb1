// SPDX-License-Identifier: Apache-2.0

package kvparams_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/kvparams"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const good = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1}`

// What is wrong with a handoff of NIXL, key by key, stands in the tests of connector/nixl, through which all of it passes. Here is which
// way a handoff goes.
func TestTheFlagSaysWhichWay(t *testing.T) {
	back := strings.NewReplacer("true", "false", "false", "true").Replace(good)
	require.NoError(t, kvparams.NIXL([]byte(good), kvparams.RemotePrefill, nil))
	require.NoError(t, kvparams.NIXL([]byte(back), kvparams.RemoteDecode, nil))
	require.Error(t, kvparams.NIXL([]byte(good), kvparams.RemoteDecode, nil), "P must not take the KV of a prompt from whoever is to take it from P")
	require.Error(t, kvparams.NIXL([]byte(back), kvparams.RemotePrefill, nil), "D hangs on it (capture nixl/39)")
}

func TestAConnectorsOwnRuleComesLast(t *testing.T) {
	seen := ""
	also := func(o *kvparams.Object) {
		seen += string(o.Text("remote_engine_id"))
		o.Fault("own", "rule")
	}
	require.EqualError(t, kvparams.NIXL([]byte(good), kvparams.RemotePrefill, also), "own rule")
	require.Error(t, kvparams.NIXL([]byte(`{}`), kvparams.RemotePrefill, also))
	assert.Equal(t, `"e"`, seen, "asked only of a handoff that is complete")
}

func TestOfAnswer(t *testing.T) {
	fine := func(json.RawMessage) error { return nil }
	answer := func(body string) *connector.PrefillResult {
		return connector.NewPrefillResult(http.StatusOK, nil, []byte(body), time.Now())
	}
	raw, err := kvparams.OfAnswer(answer(`{"kv_transfer_params" : { "a":1 } }`), fine)
	require.NoError(t, err)
	assert.Equal(t, `{ "a":1 }`, string(raw), "to the byte")
	for _, p := range []*connector.PrefillResult{nil, answer(`[]`), answer(`{}`), answer(`{"kv_transfer_params":null}`)} {
		_, err := kvparams.OfAnswer(p, fine)
		require.ErrorIs(t, err, connector.ErrNoTransfer)
	}
	_, err = kvparams.OfAnswer(answer(`{"kv_transfer_params":{}}`), func(json.RawMessage) error { return errors.New("own") })
	require.ErrorIs(t, err, connector.ErrNoTransfer)
	require.ErrorContains(t, err, "own")
}
