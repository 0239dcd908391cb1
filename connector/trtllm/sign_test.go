// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
)

// The signatures were made with Python 3's own modules:
//
//	text = json.dumps({"ctx_info_endpoint": e, "encoded_opaque_state": s}, sort_keys=True, separators=(",", ":"))
//	hmac.new(key.encode(), text.encode(), hashlib.sha256)
func TestSignaturesArePythons(t *testing.T) {
	for _, k := range []struct{ key, members, signature string }{
		{"k", `"encoded_opaque_state":"AAAA"`, "f9a769c5b29fa5570efa418d3486ef39008500201b4a85ffcb1770595c17a74e"},
		{"k", `"encoded_opaque_state":"AAAA","ctx_info_endpoint":null`,
			"f9a769c5b29fa5570efa418d3486ef39008500201b4a85ffcb1770595c17a74e"},
		{"k", `"encoded_opaque_state":"AAAA","ctx_info_endpoint":[]`,
			"f9a769c5b29fa5570efa418d3486ef39008500201b4a85ffcb1770595c17a74e"},
		{"k", `"ctx_info_endpoint":"tcp://10.0.0.1:5000"`,
			"d7beca45620b6bf07be175d992d936ad227494c3b62e35ebf26955e71c5305da"},
		{"k", `"ctx_info_endpoint":["tcp://10.0.0.1:5000","tcp://10.0.0.2:5000"]`,
			"d7beca45620b6bf07be175d992d936ad227494c3b62e35ebf26955e71c5305da"},
		{"secret é", `"encoded_opaque_state":"b64+\/=","ctx_info_endpoint":"tcp://h:1"`,
			"881a0ebde2c3860b2cd8eca9045bf0c94ea391407d0b2b76ba47bfbbf9d2459a"},
		{"k", `"encoded_opaque_state":"é😀\"\\\n\u0000` + "\x7f" + `/<>&","ctx_info_endpoint":"\u2028"`,
			"0f6c6b4e7510259d76825484aef5c64882cd7632fa5814c16ba48f42a10188e6"},
		{"k", `"encoded_opaque_state":""`, "e7c1c18f611ed2cc9197833e3dd7039f2aff9778cd3740e5a0e6e3eef7a6cfda"},
	} {
		key, err := json.Marshal(k.key)
		require.NoError(t, err)
		response := `{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":1,` +
			`"first_gen_tokens":[1],"disagg_request_id":` + id + `,` + k.members + `}}]}`
		leg, err := after(open(t, `{"authKey":`+string(key)+`}`),
			session(t, connector.APICompletions, `{"prompt":"x"}`), response)
		require.NoError(t, err)
		assert.Equal(t, http.Header{"X-Trtllm-Disagg-Auth": {"sha256=" + k.signature}}, leg.Header, k.members)
	}
}

func TestOnlyProtectedMembersAreSigned(t *testing.T) {
	leg, err := after(open(t, `{"authKey":"k"}`), session(t, connector.APICompletions, `{"prompt":"x"}`),
		`{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":1,"first_gen_tokens":[1],`+
			`"disagg_request_id":`+id+`,"encoded_opaque_state":null}}]}`)
	require.NoError(t, err)
	assert.Empty(t, leg.Header)
}
