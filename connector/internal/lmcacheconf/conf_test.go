// SPDX-License-Identifier: Apache-2.0

package lmcacheconf

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
)

func TestLMCachesMembersAreTakenOutAndTheOthersStay(t *testing.T) {
	own, engine := Split(
		json.RawMessage(`{"settleTime":"1s","chunk_size":128,"lmcache.remote_url":"redis://h","unknown":1,` +
			`"lmcache.unknown":2,"nixl_role":"sender","config_path":"x"}`),
	)
	assert.JSONEq(t, `{"settleTime":"1s","unknown":1}`, string(own))
	assert.Len(t, engine, 5)
	for _, raw := range []string{``, `null`, `[]`, `{"a":1,"a":2}`, `{"chunk_size":`} {
		own, engine := Split(json.RawMessage(raw))
		assert.Equal(t, raw, string(own), "it is for the decoder to refuse")
		assert.Empty(t, engine)
	}
}

func TestOldNamesAreTodays(t *testing.T) {
	c, err := Read(map[string]json.RawMessage{
		"enable_nixl": []byte(`true`), "lmcache.nixl_role": []byte(`"sender"`), "nixl_receiver_port": []byte(`1`),
		"nixl_buffer_size": []byte(`2`), "controller_url": []byte(`"u"`),
		"chunk_size": []byte(`null`),
	}, true)
	require.NoError(t, err)
	assert.True(t, c.Bool("enable_pd"))
	assert.Equal(t, "sender", c.Text("pd_role"))
	assert.Equal(t, []int{1}, c.Ints("pd_peer_init_port"))
	assert.Equal(t, "2", c.Text("pd_buffer_size"))
	assert.Equal(t, "u", c.Text("controller_pull_url"))
	_, given := c.Get("chunk_size")
	assert.False(t, given, "null is absent")

	c, err = Read(map[string]json.RawMessage{"nixl_buffer_size": []byte(`2`)}, false)
	require.NoError(t, err)
	assert.Equal(t, "2", c.Text("nixl_buffer_size"), "a setting of another backend where nothing is transferred")
}

// LMCache also reads numbers and booleans from text, since they may come from the environment.
func TestValuesAsLMCacheReadsThem(t *testing.T) {
	for key, values := range map[string][]string{
		"enable_pd":          {`true`, `"True"`, `"1"`, `1`, `"false"`},
		"chunk_size":         {`256`, `"256"`},
		"max_local_cpu_size": {`0.5`, `5`, `"5.5"`},
		"pd_peer_init_port":  {`8300`, `"8300"`, `"8300, 8301"`, `[8300,8301]`},
		"nixl_backends":      {`["UCX"]`, `"UCX,POSIX"`},
		"remote_url":         {`"redis://h"`},
		"extra_config":       {`{"a":[1]}`, `null`},
	} {
		for _, v := range values {
			_, err := Read(map[string]json.RawMessage{key: []byte(v)}, false)
			assert.NoError(t, err, "%s: %s", key, v)
		}
	}
	for key, v := range map[string]string{
		"enable_pd": `"yes"`, "chunk_size": `2.5`, "max_local_cpu_size": `[]`, "pd_peer_init_port": `["a"]`,
		"nixl_backends": `{}`, "remote_url": `1`, "extra_config": `{"a":}`,
	} {
		_, err := Read(map[string]json.RawMessage{key: []byte(v)}, false)
		faults := config.FieldErrors(err)
		require.Len(t, faults, 1, key)
		assert.Equal(t, key, faults[0].Path)
		assert.NotContains(t, err.Error(), v)
	}
}

func TestEveryAliasIsOfASettingThatIsThere(t *testing.T) {
	for old, now := range aliases {
		assert.Contains(t, keys, now, old)
		assert.NotContains(t, keys, old)
	}
	for old, now := range pdAliases {
		assert.Contains(t, keys, now, old)
	}
}

func FuzzSplit(f *testing.F) {
	f.Add([]byte(`{"chunk_size":128,"lmcache.remote_url":"redis://h","unknown":1}`))
	f.Add([]byte(`{"lmcache.":1,"lmcache.lmcache.chunk_size":"a","pd_peer_init_port":"1,,2"}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		PD(raw)
		own, engine := Split(raw)
		if engine == nil {
			return
		}
		_, _ = Read(engine, true)
		_, again := Split(own)
		assert.Empty(t, again, "nothing of LMCache's is left")
	})
}
