// SPDX-License-Identifier: Apache-2.0

package epd_test

import (
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func wrap(t testing.TB, o epd.Options) connector.KVConnector {
	t.Helper()
	c, err := epd.Wrap(play.Open(t, nixl.Name, ``), &o)
	require.NoError(t, err)
	return c
}

func encoder(t testing.TB, c connector.KVConnector) connector.Encoder {
	t.Helper()
	e, ok := connector.As[connector.Encoder](c)
	require.True(t, ok)
	return e
}

const (
	cat  = `{"type":"image_url","image_url":{"url":"data:image/png;base64,Y2F0"}}`
	dog  = `{"type":"image_url","image_url":{"url":"https://example.com/dog.png"},"uuid":"dog"}`
	song = `{"type":"input_audio","input_audio":{"data":"c29uZw==","format":"wav"}}`
	film = `{"type":"video_url","video_url":{"url":"https://example.com/film.mp4"}}`
	talk = `{"type":"audio_url","audio_url":{"url":"https://example.com/talk.mp3"}}`
)

func chat(parts ...string) string {
	return `{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":[{"type":"text",` +
		`"text":"what is this?"},` + strings.Join(parts, ",") +
		`]}],"max_tokens":9,"stream":true,"mm_processor_kwargs":{"fps":1}}`
}

func TestEachMediaItemOfAChatIsEncoded(t *testing.T) {
	c := wrap(t, epd.Options{Type: epd.Example})
	items := encoder(t, c).Items(play.Session(t, connector.APIChat, chat(cat, dog, song, film, talk, cat)))
	require.Len(t, items, 6)
	var parts []string
	for _, i := range items {
		parts = append(parts, string(i.Part))
	}
	assert.Equal(t, []string{cat, dog, song, film, talk, cat}, parts, "in order, as the client sent them")
	assert.Equal(t, items[0].ID, items[5].ID, "equal items are encoded once")
	assert.NotEqual(t, items[0].ID, items[1].ID)
}

func TestRequestsWithoutMediaSkipTheStage(t *testing.T) {
	e := encoder(t, wrap(t, epd.Options{Type: epd.NIXL}))
	for _, k := range []struct {
		api  connector.API
		body string
	}{
		{connector.APIChat, `{"messages":[{"role":"user","content":"what is an \"image_url\"?"}]}`},
		{connector.APIChat, `{"messages":[{"role":"user","content":[{"type":"text","text":"type: image_url\""}]}]}`},
		{connector.APIChat, chat(`{"type":"image_url","image_url":null,"uuid":"seen before"}`)},
		{connector.APIChat, chat(`{"type":"image_embeds","image_embeds":{},"image_url":{"url":"x"}}`)},
		{connector.APIChat, `{"messages":"image_url\""}`},
		{connector.APIChat, `{"messages":[` + cat + `]}`},
		{connector.APIChat, `{"messages":[{"content":[` + cat + `,]}]}`},
		{connector.APIChat, `{"messages":[{"content":[[` + cat + `]]}]}`},
		{connector.APIChat, `{}`},
		{connector.APIResponses, `{"input":[{"role":"user","content":[` + cat + `]}],"messages":[{"content":[` + cat +
			`]}]}`},
		{connector.APICompletions, `{"prompt":"x","messages":[{"content":[` + cat + `]}]}`},
	} {
		assert.Empty(t, e.Items(play.Session(t, k.api, k.body)), k.body)
	}
}

func TestAnItemsRequestHoldsThatItemAlone(t *testing.T) {
	s := play.Session(t, connector.APIChat, chat(cat, dog))
	e := encoder(t, wrap(t, epd.Options{Type: epd.Example}))
	leg := contract.NewLeg(s.Request)
	require.NoError(t, e.Encode(s, e.Items(s)[1], leg))
	got, err := play.Read(leg)
	require.NoError(t, err)
	assert.Equal(t, `{"model":"m","mm_processor_kwargs":{"fps":1},"messages":[{"role":"user","content":[`+dog+
		`]}],"max_tokens":1,"stream":false}`, got.Body)
	assert.Equal(t, "/v1/chat/completions", contract.Path(leg))
}

func legs(t *testing.T, c connector.KVConnector, s *connector.Session) (prefill, decode string) {
	t.Helper()
	response := `{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e",` +
		`"remote_request_id":"r","remote_host":"h","remote_port":1}}`
	return play.Prefill(t, c, s).Body, play.Decode(t, c, s, play.Response(response)).Body
}

func TestTheResponsesAreMergedIntoThePrefillLeg(t *testing.T) {
	for name, k := range map[string]struct {
		responses []string
		want      string
	}{
		"an object per item (vllm#47941)": {
			[]string{`{"ec_transfer_params":{"h1":{"metadata":{"grid":[[1,2]]},"peer_host":"10.0.0.5",` +
				`"peer_port":5601,"size_bytes":9007199254740993}}}`, `{"ec_transfer_params":{"h2":{"metadata":{}}}}`},
			`{"h1":{"metadata":{"grid":[[1,2]]},"peer_host":"10.0.0.5","peer_port":5601,` +
				`"size_bytes":9007199254740993},"h2":{"metadata":{}}}`},
		"ECExampleConnector, as vLLM 0.32.0 sent it": {
			[]string{`{"ec_transfer_params":{"4aa776f4":{"item_indices":[0],"metadata":{}}}}`,
				`{"ec_transfer_params":{"39d278ff":{"item_indices":[0],"metadata":{}}}}`},
			`{"4aa776f4":{"item_indices":[0],"metadata":{}},"39d278ff":{"item_indices":[0],"metadata":{}}}`},
		"a list of items": {
			[]string{`{"ec_transfer_params":{"ec_items":[{"mm_hash":"h1","grid":[1]}]}}`,
				`{"ec_transfer_params":{"ec_items":[{"mm_hash":"h2"},{"mm_hash":"h1"}]}}`},
			`{"ec_items":[{"mm_hash":"h1","grid":[1]},{"mm_hash":"h2"}]}`},
		"what a later version says besides": {
			[]string{`{"ec_transfer_params":{"version":2,"more":["a"],"h2":null,"none":null}}`,
				`{"ec_transfer_params":{"version":2,"more":["b","a"],"h2":{"x":null}}}`},
			`{"version":2,"more":["a","b"],"h2":{"x":null}}`},
		"the same picture twice": {
			[]string{`{"ec_transfer_params":{"h1":{"peer_host":"a"}}}`,
				`{"ec_transfer_params":{"h1":{"peer_host":"b"}}}`},
			`{"h1":{"peer_host":"a"}}`},
	} {
		t.Run(name, func(t *testing.T) {
			c := wrap(t, epd.Options{Type: epd.NIXL})
			body := strings.Replace(chat(cat, dog), `"model"`, `"ec_transfer_params":{"evil":{}},"model"`, 1)
			s := play.Session(t, connector.APIChat, body)
			var responses []json.RawMessage
			for _, a := range k.responses {
				responses = append(responses, json.RawMessage(a))
			}
			require.NoError(t, encoder(t, c).Merge(s, responses))
			prefill, decode := legs(t, c, s)
			assert.Contains(t, prefill, `"ec_transfer_params":`+k.want)
			assert.Contains(t, prefill, `"do_remote_decode":true`, "beside the inner connector's")
			assert.Contains(t, prefill, cat, "the media stay: what P cannot get, it encodes itself")
			assert.NotContains(t, decode, "ec_transfer_params",
				"all of D's prompt comes from P; the client's own never")
			assert.Contains(t, decode, cat)
			assert.NotContains(t, prefill+decode, "evil")
		})
	}
}

func TestAFolderNeedsNoParameters(t *testing.T) {
	c, s := wrap(t, epd.Options{Type: epd.Example}), play.Session(t, connector.APIChat, chat(cat))
	require.NoError(t, encoder(t, c).Merge(s, []json.RawMessage{[]byte(`{"id":"x","ec_transfer_params":null}`)}))
	prefill, _ := legs(t, c, s)
	assert.NotContains(t, prefill, "ec_transfer_params")
}

func TestAResponseThatCannotBeUsedIsRefused(t *testing.T) {
	for _, response := range []string{
		`[]`, `{`, ``, `{"a":1,"a":2}`,
		`{"ec_transfer_params":[]}`, `{"ec_transfer_params":"x"}`, `{"ec_transfer_params":{"h":{},"h":{}}}`,
		`{"ec_transfer_params":{"h":{"a":[1,,]}}}`, `{"ec_transfer_params":{"ec_items":[{]}}}`,
		`{"ec_transfer_params":{"h":` + strings.Repeat("[", 500) + strings.Repeat("]", 500) + `}}`,
		"{\"ec_transfer_params\":{\"h\":\"\xff\"}}",
	} {
		for _, kind := range epd.Types() {
			c, s := wrap(t, epd.Options{Type: kind}), play.Session(t, connector.APIChat, chat(cat))
			require.ErrorIs(t, encoder(t, c).Merge(s, []json.RawMessage{[]byte(response)}), connector.ErrNoTransfer,
				response)
		}
	}
	c, s := wrap(t, epd.Options{Type: epd.NIXL}), play.Session(t, connector.APIChat, chat(cat))
	require.ErrorIs(t, encoder(t, c).Merge(s, []json.RawMessage{
		[]byte(`{"ec_transfer_params":{"ec_items":[]}}`), []byte(`{"ec_transfer_params":{"ec_items":{}}}`),
	}), connector.ErrNoTransfer)
	for _, response := range []string{`{}`, `{"ec_transfer_params":null}`, `{"ec_transfer_params":{}}`} {
		c, s := wrap(t, epd.Options{Type: epd.NIXL}), play.Session(t, connector.APIChat, chat(cat))
		require.ErrorIs(t, encoder(t, c).Merge(s, []json.RawMessage{[]byte(response)}), connector.ErrNoTransfer,
			"P could not find the embedding")
	}
}

func TestMoreMediaThanTheStageTakesAreForOneEngine(t *testing.T) {
	c := wrap(t, epd.Options{Type: epd.Example, MaxItems: 3})
	assert.Empty(t, play.Uncarried(c, play.Session(t, connector.APIChat, chat(cat, dog, song)).Request))
	many := play.Session(t, connector.APIChat, chat(cat, dog, song, cat))
	assert.Equal(t, "messages", play.Uncarried(c, many.Request))
	assert.Empty(t, encoder(t, c).Items(many))
	assert.Equal(t, "n", play.Uncarried(c, play.Session(t, connector.APIChat, `{"n":2}`).Request),
		"the inner connector's reasons stay")
}

// full has an ability of each kind for which a flow looks.
type full struct {
	connector.KVConnector
	closed *bool
}

func (full) Start(context.Context) error { return nil }
func (f full) Close() error              { *f.closed = true; return nil }
func (full) Traits() connector.Traits {
	return connector.Traits{Name: "full", Serving: connector.Serving{PairOnly: true},
		Handoff: connector.Handoff{Lease: time.Minute}}
}

func TestTheInnerConnectorsAbilitiesStayVisible(t *testing.T) {
	inner, err := plainhttp.New(nil)
	require.NoError(t, err)
	closed := false
	c, err := epd.Wrap(full{inner, &closed}, &epd.Options{Type: epd.Example})
	require.NoError(t, err)
	assert.Equal(t, "full", c.Traits().Name)
	_, ok := connector.As[connector.Starter](c)
	assert.True(t, ok)
	assert.True(t, c.Traits().Serving.PairOnly)
	assert.Equal(t, time.Minute, c.Traits().Handoff.Lease)
	closer, ok := connector.As[io.Closer](c)
	require.True(t, ok)
	require.NoError(t, closer.Close())
	assert.True(t, closed)
	_, ok = connector.As[connector.Expecter](c)
	assert.False(t, ok)
}

func TestSettings(t *testing.T) {
	inner, err := plainhttp.New(nil)
	require.NoError(t, err)
	for want, o := range map[string]*epd.Options{
		"type": nil, "known encoder": {Type: "mooncake"}, "maxItems": {Type: epd.Example, MaxItems: -1},
		"cpuBytes": {Type: epd.NIXL, CPUBytes: -1},
	} {
		_, err := epd.Wrap(inner, o)
		require.ErrorContains(t, err, want)
	}
	_, err = epd.Wrap(nil, &epd.Options{Type: epd.Example})
	require.Error(t, err)
}

// For any request of a client, nothing panics, and the encoded items are objects of the request itself.
func FuzzItems(f *testing.F) {
	for _, b := range []string{chat(cat), chat(dog, song),
		`{"messages":[{"content":[{"type":"image_url","image_url":1}]}]}`,
		`{"messages":[{"content":{"type":"image_url"}}]}`,
		`{"messages":[{"content":[{"type":"image_url","image_url":{}}]}],"mm_processor_kwargs":{""}}`} {
		f.Add([]byte(b))
	}
	inner, err := plainhttp.New(nil)
	require.NoError(f, err)
	c, err := epd.Wrap(inner, &epd.Options{Type: epd.Example, MaxItems: 4})
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := connector.ParseRequest(connector.APIChat, body)
		if err != nil {
			return
		}
		s := contract.NewSession(r, "id", discovery.Endpoint{}, discovery.Endpoint{})
		e := c.(*epd.Connector)
		items := e.Items(s)
		require.LessOrEqual(t, len(items), 4)
		for _, i := range items {
			require.Contains(t, string(body), string(i.Part))
			leg := contract.NewLeg(r)
			require.NoError(t, e.Encode(s, i, leg))
			b, err := contract.Body(leg)
			require.NoError(t, err)
			// what is malformed in the client's members is the engine's to refuse
			require.True(t, json.Valid(b) || !json.Valid(body), "%s", b)
		}
	})
}
