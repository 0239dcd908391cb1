// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const good = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1}`

// What is wrong with a handoff, key by key, stands in the tests of connector/nixl, through which all of it passes. Here is which way a
// handoff goes.
func TestTheFlagSaysWhichWay(t *testing.T) {
	back := strings.NewReplacer("true", "false", "false", "true").Replace(good)
	require.NoError(t, Check([]byte(good), Prefill))
	require.NoError(t, Check([]byte(back), Decode))
	require.ErrorIs(t, Check([]byte(good), Decode), connector.ErrNoTransfer, "P must not take the KV of a prompt from whoever is to take it from P")
	require.ErrorIs(t, Check([]byte(back), Prefill), connector.ErrNoTransfer, "D hangs on it (capture nixl/39)")
}

func TestAConnectorsOwnRuleComesLast(t *testing.T) {
	own := errors.New("own")
	seen := ""
	also := func(d *jsonedit.Doc) error {
		v, _ := d.Get("remote_engine_id")
		seen += string(v)
		return own
	}
	answer := func(body string) *connector.PrefillResult {
		return connector.NewPrefillResult(http.StatusOK, nil, []byte(body), time.Now())
	}
	_, err := OfAnswer(answer(`{"kv_transfer_params":`+good+`}`), also)
	require.ErrorIs(t, err, own)
	_, err = OfAnswer(answer(`{"kv_transfer_params":{}}`), also)
	require.ErrorIs(t, err, connector.ErrNoTransfer)
	assert.Equal(t, `"e"`, seen, "asked only of a handoff that is complete")
	raw, err := OfAnswer(answer(`{"kv_transfer_params" : `+good+`}`), nil)
	require.NoError(t, err)
	assert.Equal(t, good, string(raw))
}
