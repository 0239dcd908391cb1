// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
)

const encoders = "x-encoder-hosts-ports" // as llm-d's scheduler writes it

// stage is a sidecar with an encode engine and a pair.
type stage struct {
	e, p, d, alone *enginesim.Engine
	side           *program
}

func staged(t *testing.T, kind string) stage {
	t.Helper()
	producer, consumer := map[string]string{"ec_role": "ec_producer"}, map[string]string{"ec_role": "ec_consumer"}
	if kind == "ec-example" {
		dir := t.TempDir()
		producer["ec_shared_storage_path"], consumer["ec_shared_storage_path"] = dir, dir
	}
	var x stage
	x.p, x.d = twoEngines(t, enginesim.Config{Extra: consumer}, enginesim.Config{})
	x.e = lone(t, enginesim.Config{Extra: producer, Listen: "127.0.0.1:" + strconv.Itoa(ports(t, 1))})
	x.alone = lone(t, enginesim.Config{})
	x.side = before(t, x.d.URL(), nil, "--ec-connector="+
		kind,
		"--prefillers="+hostPort(t, x.p.URL()), "--encoders="+hostPort(t, x.e.URL()))
	return x
}

func (x *stage) chat(t *testing.T, body string, headers ...string) (int, string, string) {
	t.Helper()
	status, h, response := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.side.addr+"/v1/chat/completions",
		body, headers...)
	return status, h.Get("X-Pd-Mode"), response
}

// chatWith is a chat with two pictures, one of them twice.
func chatWith(n int, stream bool) string {
	image := func(name string) string {
		return fmt.Sprintf(`{"type":"image_url","image_url":{"url":"https://example.com/%s-%d.png"}}`, name, n)
	}
	return fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"what is on `+
		`these?"},%s,%s,%s]}],"max_tokens":12,"temperature":0,"stream":%t}`,
		image("cat"), image("dog"), image("cat"), stream)
}

func chatText(response string) string {
	var b strings.Builder
	for line := range strings.Lines(response) {
		line = strings.TrimPrefix(line, "data: ")
		b.WriteString(gjson.Get(line, "choices.0.message.content").String() +
			gjson.Get(line, "choices.0.delta.content").String())
	}
	return b.String()
}

// The scheduler names engines for encode and for prefill. The text is that of one engine alone.
func TestMediaAreEncodedByTheEnginesInTheHeader(t *testing.T) {
	for _, kind := range []string{"ec-example", "ec-nixl"} {
		t.Run(kind, func(t *testing.T) {
			x := staged(t, kind)
			for n, stream := range []bool{false, true} {
				status, mode, response := x.chat(t, chatWith(n, stream), header, hostPort(t, x.p.URL()), encoders,
					hostPort(t, x.e.URL()))
				require.Equal(t, http.StatusOK, status, response)
				assert.Equal(t, "disaggregated", mode)
				_, _, want := ask(t, http.DefaultClient, http.MethodPost, x.alone.URL()+"/v1/chat/completions",
					chatWith(n, stream))
				require.NotEmpty(t, chatText(response))
				assert.Equal(t, chatText(want), chatText(response))
				assert.EqualValues(t, 2*(n+1), x.e.Stats().MediaEncoded, "equal pictures are encoded once")
				assert.EqualValues(t, 2*(n+1), x.p.Stats().MediaLoaded)
			}
			assert.Zero(t, x.p.Stats().MediaComputed)
		})
	}
}

// As in llm-d's sidecar, encode engines that are not listed are skipped. If none is left, the prefill engine encodes by
// itself.
func TestEncodeEnginesThatAreNotListedAreNotCalled(t *testing.T) {
	x := staged(t, "ec-nixl")
	asked := make(chan string, 10)
	outside := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Path
	}))
	defer outside.Close()
	for n, value := range []string{hostPort(t, outside.URL), hostPort(t, x.p.URL()), "nonsense", ""} {
		status, mode, response := x.chat(t, chatWith(n, false), header, hostPort(t, x.p.URL()), encoders, value)
		require.Equal(t, http.StatusOK, status, response)
		assert.Equal(t, "disaggregated", mode)
		assert.EqualValues(t, 2*(n+1), x.p.Stats().MediaComputed)
	}
	assert.Zero(t, x.e.Stats().MediaEncoded)
	status, _, response := x.chat(t, chatWith(9, false), header, hostPort(t, x.p.URL()), encoders,
		hostPort(t, outside.URL)+", http://"+hostPort(t, x.e.URL()))
	require.Equal(t, http.StatusOK, status, response)
	assert.EqualValues(t, 2, x.e.Stats().MediaEncoded, "the listed one is asked")
	assert.Empty(t, asked)
	status, _, _ = x.chat(t, chatWith(10, false), header, hostPort(t, x.e.URL()), encoders, hostPort(t, x.e.URL()))
	assert.Equal(t, http.StatusForbidden, status, "an encode engine is no prefill engine")
}

func TestAnEncodeEngineThatFailsEndsTheRequest(t *testing.T) {
	x := staged(t, "ec-nixl")
	require.NoError(t, x.e.Close())
	status, _, response := x.chat(t, chatWith(0, false), header, hostPort(t, x.p.URL()), encoders,
		hostPort(t, x.e.URL()))
	assert.Equal(t, http.StatusBadGateway, status)
	assert.Equal(t, "encode_failed", gjson.Get(response, "error.code").String())
	assert.Empty(t, x.p.Requests())
}

// The sidecar has no encode stage before a single engine that does everything else: that engine encodes by itself, and
// the sidecar warns once.
func TestWithoutAPrefillEngineTheDecodeEngineEncodesByItself(t *testing.T) {
	x := staged(t, "ec-nixl")
	for n := range 2 {
		status, mode, response := x.chat(t, chatWith(n, false), encoders, hostPort(t, x.e.URL()))
		require.Equal(t, http.StatusOK, status, response)
		assert.Equal(t, "aggregated", mode)
		_, _, want := ask(t, http.DefaultClient, http.MethodPost, x.alone.URL()+"/v1/chat/completions",
			chatWith(n, false))
		assert.Equal(t, chatText(want), chatText(response))
	}
	assert.Zero(t, x.e.Stats().MediaEncoded)
	assert.Equal(t, 1, strings.Count(x.side.log.String(), "encodes their media itself"))
}

// Without --ec-connector the sidecar ignores the header, as llm-d's does, and does not forward it.
func TestWithoutAnEncodeStageTheHeaderIsIgnored(t *testing.T) {
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil)
	status, _, response := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/chat/completions",
		chatWith(0, false), header, hostPort(t, p.URL()), encoders, "127.0.0.1:1")
	require.Equal(t, http.StatusOK, status, response)
	for _, r := range append(p.Requests(), d.Requests()...) {
		assert.Empty(t, r.Header.Values(encoders))
	}
}
