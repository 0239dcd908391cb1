// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/ascendlayerwise"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

func started(t testing.TB) *ascendlayerwise.Connector {
	t.Helper()
	c := play.New(t, ascendlayerwise.New, &ascendlayerwise.Options{CallbackListen: "127.0.0.1:0"})
	require.NoError(t, c.Start(t.Context()))
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// metaserver is the URL that D gets.
func metaserver(t testing.TB, c connector.KVConnector, s *connector.Session) string {
	t.Helper()
	return gjson.Get(play.Decode(t, c, s, nil).Body, "kv_transfer_params.metaserver").String()
}

var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

type reply struct {
	status int
	body   string
}

// call posts a callback and sends its response on the channel.
func call(ctx context.Context, t testing.TB, url, body string) <-chan reply {
	t.Helper()
	ch := make(chan reply, 1)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	go func() {
		resp, err := client.Do(r)
		if err != nil {
			ch <- reply{0, err.Error()}
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		ch <- reply{resp.StatusCode, string(b)}
	}()
	return ch
}

func soon(t testing.TB, ch <-chan reply) reply {
	t.Helper()
	select {
	case r := <-ch:
		return r
	case <-time.After(20 * time.Second):
		t.Fatal("the callback is not answered")
		return reply{}
	}
}

func unanswered(t testing.TB, ch <-chan reply) {
	t.Helper()
	select {
	case r := <-ch:
		t.Fatalf("the callback is answered already: %v", r)
	case <-time.After(50 * time.Millisecond):
	}
}

const ok = `{"status":"ok"}`

// D's callback starts P. It is answered when P has answered: not earlier, and not only when D's text is complete.
func TestACallbackIsAnsweredWithPsResponse(t *testing.T) {
	for _, api := range []connector.API{connector.APICompletions, connector.APIChat, connector.APIResponses,
		connector.APIMessages, connector.APIGenerate} {
		t.Run(api.String(), func(t *testing.T) {
			c, s := started(t), play.Session(t, api, `{}`)
			wait, done := c.Expect(s)
			url := metaserver(t, c, s)
			body := callback(engineID(api, s.ID))
			got := call(t.Context(), t, url, body)
			event, err := wait(t.Context())
			require.NoError(t, err)
			assert.Equal(t, body, string(event.Body), "as D sent it")
			assert.WithinDuration(t, time.Now(), event.At, 5*time.Second)
			unanswered(t, got)
			require.NoError(t, c.CheckPrefill(s, play.Response(`{}`)))
			assert.Equal(t, reply{200, ok}, soon(t, got))
			done(errors.New("D broke later"))
			assert.Equal(t, reply{200, ok}, soon(t, call(t.Context(), t, url, body)), "P's KV was pushed all the same")
		})
	}
}

func TestACallbackWhosePrefillFailedIsAnswered502(t *testing.T) {
	c, s := started(t), play.Session(t, connector.APIChat, `{}`)
	wait, done := c.Expect(s)
	got := call(t.Context(), t, metaserver(t, c, s), callback("chatcmpl-"+s.ID))
	_, err := wait(t.Context())
	require.NoError(t, err)
	done(errors.New("P is gone"))
	r := soon(t, got)
	assert.Equal(t, http.StatusBadGateway, r.status)
	assert.NotContains(t, r.body, "gone")
}

// D's client tries three times if a connection breaks. P runs once for the session, and each try gets the same
// response.
func TestRepeatedCallbacksAreAnsweredAlike(t *testing.T) {
	for _, failure := range []error{nil, errors.New("P failed")} {
		c, s := started(t), play.Session(t, connector.APIChat, `{}`)
		wait, done := c.Expect(s)
		url, body := metaserver(t, c, s), callback("chatcmpl-"+s.ID)
		ctx, leave := context.WithCancel(t.Context())
		first := call(ctx, t, url, body)
		_, err := wait(t.Context())
		require.NoError(t, err)
		leave()
		require.Zero(t, soon(t, first).status)
		second := call(t.Context(), t, url, body)
		unanswered(t, second)
		done(failure)
		want := map[bool]int{true: 200, false: 502}[failure == nil]
		assert.Equal(t, want, soon(t, second).status)
		assert.Equal(t, want, soon(t, call(t.Context(), t, url, body)).status, "once it is over, too")
	}
}

func TestCallbacksOfNobodyAreRefused(t *testing.T) {
	c, s := started(t), play.Session(t, connector.APIChat, `{}`)
	_, done := c.Expect(s)
	defer done(nil)
	url := metaserver(t, c, s)
	for what, k := range map[string]struct {
		body   string
		status int
	}{
		"another session's id":        {callback("chatcmpl-ffffffffffffffffffffffffffffffff"), 404},
		"the id of another API":       {callback("cmpl-" + s.ID + "-0"), 404},
		"the session's own id":        {callback(s.ID), 404},
		"with the engine's suffix":    {callback("chatcmpl-" + s.ID + "-1a2b3c4d"), 404},
		"no body":                     {``, 400},
		"not JSON":                    {`<html>`, 400},
		"not one object":              {`[` + callback("chatcmpl-"+s.ID) + `]`, 400},
		"no id":                       {`{}`, 400},
		"an id that is no string":     {`{"request_id":["chatcmpl-` + s.ID + `"]}`, 400},
		"an id twice":                 {`{"request_id":"a","request_id":"b"}`, 400},
		"an empty id":                 {`{"request_id":""}`, 400},
		"more than 4 MiB":             {`{"request_id":"` + strings.Repeat("x", 4<<20) + `"}`, 413},
		"trailing bytes after it all": {callback("chatcmpl-"+s.ID) + `{}`, 400},
	} {
		r := soon(t, call(t.Context(), t, url, k.body))
		assert.Equal(t, k.status, r.status, what)
		assert.True(t, json.Valid([]byte(r.body)), r.body)
		assert.NotContains(t, r.body, s.ID, what)
	}
	resp, err := client.Get(url)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusMethodNotAllowed, resp.StatusCode)
	assert.Equal(t, "POST", resp.Header.Get("Allow"))
	assert.Equal(
		t, 404, soon(t, call(t.Context(), t, strings.TrimSuffix(url, "metaserver"), callback("chatcmpl-"+s.ID))).status,
	)
}

// A callback of which P's engine would die ends the session: P could not push, and D would wait for ever. The error
// names the key and holds no value.
func TestACallbackThatLacksWhatPNeedsEndsTheSession(t *testing.T) {
	play.Spoilt(t, callback("chatcmpl-ID"), map[string][]string{
		"do_remote_decode":     {"-", "false", "null"},
		"do_remote_prefill":    {"true"},
		"remote_engine_id":     {"-", `""`, "4321"},
		"remote_host":          {"-", `""`, "null"},
		"remote_port":          {"-", "0", "65536", `"4321"`},
		"remote_block_ids":     {"-", "null", "[4321]", `[["4321"]]`, "[[-4321]]", "{}"},
		"remote_block_size":    {"0", "[]", "[0.5]", "[[4321]]", `"4321"`},
		"remote_tp_size":       {"0", `"4321"`},
		"remote_pcp_size":      {"0"},
		"remote_dcp_size":      {"0"},
		"remote_cached_tokens": {"-4321", `"4321"`},
	}, func(bad string) error {
		c, s := started(t), play.Session(t, connector.APIChat, `{}`)
		wait, done := c.Expect(s)
		got := soon(t, call(t.Context(), t, metaserver(t, c, s), strings.Replace(bad, "ID", s.ID, 1)))
		assert.Equal(t, http.StatusBadRequest, got.status, bad)
		_, err := wait(t.Context())
		done(err)
		return err
	}, "10.0.0.6")
}

// P's engine has a default for these keys if they are absent, and calculates with None if they are null.
func TestWhatMayBeAbsentIsAbsentIfItIsNull(t *testing.T) {
	s := play.Session(t, connector.APIChat, `{}`)
	null, want := callback("chatcmpl-"+s.ID), callback("chatcmpl-"+s.ID)
	for _, key := range []string{"remote_block_size", "remote_tp_size", "remote_pcp_size", "remote_dcp_size",
		"remote_cached_tokens"} {
		var err error
		null, err = sjson.SetRaw(null, key, "null")
		require.NoError(t, err)
		want, err = sjson.Delete(want, key)
		require.NoError(t, err)
	}
	s.Event = connector.Event{Body: []byte(null)}
	assert.Contains(t, play.Prefill(t, started(t), s).Body, `"kv_transfer_params":`+want)
}

// A D that has the whole prompt calls back, too, but does not wait. P's engine cannot read an empty list of blocks.
func TestACallbackWithoutBlocksStartsNothing(t *testing.T) {
	for _, blocks := range []string{`[]`, `[[]]`, `[[],[]]`} {
		c, s := started(t), play.Session(t, connector.APIChat, `{}`)
		wait, done := c.Expect(s)
		body := strings.Replace(callback("chatcmpl-"+s.ID), `[[11,12]]`, blocks, 1)
		assert.Equal(t, reply{200, ok}, soon(t, call(t.Context(), t, metaserver(t, c, s), body)))
		ctx, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := wait(ctx)
		stop()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		done(nil)
	}
}

func TestConnectorsShareTheListenerOfAnAddress(t *testing.T) {
	port, err := freeport.One()
	require.NoError(t, err)
	address := "127.0.0.1:" + port
	o := &ascendlayerwise.Options{CallbackListen: address}
	open := func() *ascendlayerwise.Connector {
		c, err := ascendlayerwise.New(o)
		require.NoError(t, err)
		require.NoError(t, c.Start(t.Context()))
		return c
	}
	a := open()
	o = &ascendlayerwise.Options{CallbackListen: strings.Replace(address, "127.0.0.1", "localhost", 1),
		CallbackURL: "http://" + address}
	b := open()
	require.NoError(t, b.Start(t.Context()), "of a second flow")
	sa, sb := play.Session(t, connector.APIChat, `{}`), play.Session(t, connector.APIChat, `{}`)
	require.Equal(t, "http://"+address+"/v1/metaserver", metaserver(t, a, sa))
	_, doneA := a.Expect(sa)
	waitB, doneB := b.Expect(sb)
	doneA(nil)
	require.NoError(t, a.Close())
	require.NoError(t, a.Close(), "a second Close does nothing")

	got := call(t.Context(), t, metaserver(t, b, sb), callback("chatcmpl-"+sb.ID))
	_, err = waitB(t.Context())
	require.NoError(t, err, "the other one still listens")
	doneB(nil)
	assert.Equal(t, 200, soon(t, got).status)
	require.NoError(t, b.HealthCheck(t.Context()))
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())

	again, err := net.Listen("tcp", address)
	require.NoError(t, err, "the last Close gives the address back")
	c, err := ascendlayerwise.New(o)
	require.NoError(t, err)
	err = c.Start(t.Context())
	require.Error(t, err, "somebody else's address")
	assert.NotContains(t, err.Error(), address)
	require.NoError(t, again.Close())
	require.NoError(t, c.Start(t.Context()), "and it can be taken again")
	require.NoError(t, c.Close())
	require.NoError(t, c.HealthCheck(t.Context()), "what is not started is not ill")
}

func TestCloseEndsEverybodyWhoWaits(t *testing.T) {
	c, err := ascendlayerwise.New(&ascendlayerwise.Options{CallbackListen: "127.0.0.1:0"})
	require.NoError(t, err)
	require.NoError(t, c.Start(t.Context()))
	asked, idle := play.Session(t, connector.APIChat, `{}`), play.Session(t, connector.APIChat, `{}`)
	wait, _ := c.Expect(asked)
	waitIdle, _ := c.Expect(idle)
	got := call(t.Context(), t, metaserver(t, c, asked), callback("chatcmpl-"+asked.ID))
	_, err = wait(t.Context())
	require.NoError(t, err)
	require.NoError(t, c.Close())
	assert.Equal(t, http.StatusServiceUnavailable, soon(t, got).status)
	_, err = waitIdle(t.Context())
	require.Error(t, err)
	require.NotErrorIs(t, err, context.Canceled)

	late, done := c.Expect(idle)
	_, err = late(t.Context())
	require.Error(t, err, "nobody listens")
	done(nil)
}

// Hundreds of sessions run at once, and each gets its own callback.
func TestSessionsAtOnceGetTheirOwnCallbacks(t *testing.T) {
	c := started(t)
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			s := play.Session(t, connector.APICompletions, `{"prompt":"x"}`)
			wait, done := c.Expect(s)
			got := call(t.Context(), t, metaserver(t, c, s), callback("cmpl-"+s.ID+"-0"))
			event, err := wait(t.Context())
			if assert.NoError(t, err) {
				assert.True(t, bytes.Contains(event.Body, []byte(s.ID)))
			}
			assert.NoError(t, c.CheckPrefill(s, nil))
			done(nil)
			assert.Equal(t, 200, soon(t, got).status)
		})
	}
	wg.Wait()
}

// Each turn of a tool that the engine runs itself would be another request, with another callback.
func TestBuiltInToolsAreNotCarried(t *testing.T) {
	c := play.Open(t, "MooncakeLayerwiseConnector", ``)
	for body, member := range map[string]string{
		`{"input":"hi","tools":[{"type":"function"}]}`:                                  "",
		`{"input":"hi","tools":[{"type":"function"},{"type":"code_interpreter"}]}`:      "tools",
		`{"input":"hi","tools":"nonsense"}`:                                             "",
		`{"previous_response_id":"r","tools":[{"type":"web_search"}]}`:                  "previous_response_id",
		`{"input":"hi","tools":null}`:                                                   "",
		`{"input":"hi","tools":[{"type":"mcp","server_url":"http://tools.example/x"}]}`: "tools",
	} {
		assert.Equal(t, member, play.Uncarried(c, play.Request(t, connector.APIResponses, body)), body)
	}
}

func TestCallbackURLs(t *testing.T) {
	for _, k := range []struct{ listen, url, want string }{
		{"", "", "http://127.0.0.1:8600/v1/metaserver"},
		{"10.0.0.1:9000", "", "http://10.0.0.1:9000/v1/metaserver"},
		{"[2001:db8::1]:9000", "", "http://[2001:db8::1]:9000/v1/metaserver"},
		{":9000", "http://gateway.example:9000", "http://gateway.example:9000/v1/metaserver"},
		{"[::]:9000", "https://[2001:db8::1]/", "https://[2001:db8::1]/v1/metaserver"},
		{"0.0.0.0:9000", "https://gateway.example/pd/", "https://gateway.example/pd/v1/metaserver"},
	} {
		c := play.New(t, ascendlayerwise.New, &ascendlayerwise.Options{CallbackListen: k.listen, CallbackURL: k.url})
		assert.Equal(t, k.want, metaserver(t, c, play.Session(t, connector.APIChat, `{}`)))
	}
	var zero ascendlayerwise.Connector
	_, err := play.TryDecode(&zero, play.Session(t, connector.APIChat, `{}`), nil)
	require.Error(t, err, "without an address to give")
	_, err = ascendlayerwise.New(&ascendlayerwise.Options{CallbackListen: "0.0.0.0:8600"})
	faults := config.FieldErrors(err)
	require.Len(t, faults, 1)
	assert.Equal(t, "callbackURL", faults[0].Path, "a wildcard is no address that D can reach")
}
