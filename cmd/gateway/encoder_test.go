// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// stage is a gateway in front of an encode engine and a pair.
type stage struct {
	pairOf
	e *enginesim.Engine
}

func startStage(t *testing.T, kind string, spec ...string) stage {
	t.Helper()
	producer, consumer := map[string]string{"ec_role": "ec_producer"}, map[string]string{"ec_role": "ec_consumer"}
	switch kind {
	case "example":
		dir := t.TempDir()
		producer["ec_shared_storage_path"], consumer["ec_shared_storage_path"] = dir, dir
	case "two folders":
		kind = "example"
		producer["ec_shared_storage_path"], consumer["ec_shared_storage_path"] = t.TempDir(), t.TempDir()
	}
	e := newSim(t, enginesim.Config{Extra: producer, Listen: "127.0.0.1:" + unusedPort(t)})
	return stage{hybrid(t, enginesim.Config{Extra: consumer}, enginesim.Config{},
		"  kvConnector: {type: nixl, retry: {maxAttempts: 1}}\n  encoder: {type: "+kind+"}\n"+strings.Join(spec, ""),
		entry(e.URL(), "encode", nil)), e}
}

func chatOf(parts string, stream bool) string {
	return fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":%q},%s]}],`+
		`"max_tokens":12,"temperature":0,"stream":%t}`,
		strings.Repeat("what is on these? ", 10), parts, stream)
}

const (
	imageOfACat = `{"type":"image_url","image_url":{"url":"data:image/png;base64,Y2F0"}}`
	imageOfADog = `{"type":"image_url","image_url":{"url":"https://example.com/dog.png"}}`
	aSong       = `{"type":"input_audio","input_audio":{"data":"c29uZw==","format":"wav"}}`
)

// Each distinct item is encoded by an encode engine, P takes all of them over, D takes P's KV over, and the text is
// that of one engine.
func TestMediaAreEncodedBeforeTheLegs(t *testing.T) {
	for _, kind := range []string{"example", "nixl"} {
		t.Run(kind, func(t *testing.T) {
			x := startStage(t, kind)
			for i, stream := range []bool{false, true} {
				body := chatOf(strings.Join([]string{imageOfACat, imageOfADog, imageOfACat, aSong}, ","), stream)
				status, h, response := do(t, http.MethodPost, x.gateway.client+"/v1/chat/completions", body)
				require.Equal(t, http.StatusOK, status, "%s\n%s", response, x.gateway.log)
				assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"))
				_, _, want := do(t, http.MethodPost, x.alone.URL()+"/v1/chat/completions", body)
				assert.Equal(t, texts(t, want), texts(t, response))
				assert.EqualValues(t, 3*(i+1), x.e.Stats().MediaEncoded, "two equal items are one request")
				assert.EqualValues(t, 3*(i+1), x.p.Stats().MediaLoaded)
			}
			assert.Zero(t, x.p.Stats().MediaComputed)
			assert.Positive(t, x.d.Stats().ExternalKVTransfer)
			x.clean(t)
		})
	}
}

// The media stay in the prefill leg: what P cannot get, it encodes itself, and the response is right all the same.
func TestMediaThatPCannotGetAreEncodedByP(t *testing.T) {
	x := startStage(t, "two folders")
	for i, stream := range []bool{false, true} {
		body := chatOf(imageOfACat+","+aSong, stream)
		status, _, response := do(t, http.MethodPost, x.gateway.client+"/v1/chat/completions", body)
		require.Equal(t, http.StatusOK, status, "%s\n%s", response, x.gateway.log)
		_, _, want := do(t, http.MethodPost, x.alone.URL()+"/v1/chat/completions", body)
		assert.Equal(t, texts(t, want), texts(t, response))
		assert.EqualValues(t, 2*(i+1), x.p.Stats().MediaComputed)
		assert.Zero(t, x.p.Stats().MediaLoaded)
	}
}

func TestATextSkipsTheEncodeStage(t *testing.T) {
	x := startStage(t, "nixl")
	status, _, response := do(t, http.MethodPost, x.gateway.client+"/v1/chat/completions",
		`{"model":"tiny","messages":[{"role":"user","content":"an image_url\" in words"}],"max_tokens":3}`)
	require.Equal(t, http.StatusOK, status, response)
	assert.Empty(t, x.e.Requests())
}

func TestAFailedItemFailsTheRequest(t *testing.T) {
	x := startStage(t, "nixl")
	x.e.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500})
	status, _, response := do(t, http.MethodPost, x.gateway.client+"/v1/chat/completions",
		chatOf(imageOfACat+","+aSong, false))
	assert.Equal(t, http.StatusBadGateway, status, response)
	assert.Contains(t, response, `"encode_failed"`)
	assert.Empty(t, x.p.Requests(), "no leg is sent")
	assert.Empty(t, x.d.Requests())

	require.NoError(t, x.e.Close())
	status, _, response = do(t, http.MethodPost, x.gateway.client+"/v1/chat/completions", chatOf(aSong, false))
	assert.GreaterOrEqual(t, status, 502, response)
	assert.Empty(t, x.p.Requests())
}
