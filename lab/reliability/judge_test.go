// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/sjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/lab/internal/apis"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// scene is a fleet whose gateway is a function of the right response.
func scene(t *testing.T, o *order, gateway func(w http.ResponseWriter, right string)) (*fleet, *model) {
	t.Helper()
	m := &model{order: o}
	var err error
	m.lone, err = enginesim.Start(o.loneConfig())
	require.NoError(t, err)
	f := &fleet{client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, patience: 20 * time.Second}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		q := request{model: m, api: &apis.API{Path: r.URL.Path}, body: body}
		_, text, _, err := f.post(r.Context(), m.lone.URL(), q)
		if r.Context().Err() == nil && assert.NoError(t, err) { // or the client has left
			gateway(w, text)
		}
	}))
	f.url = server.URL
	t.Cleanup(func() { server.Close(); assert.NoError(t, m.lone.Close()) })
	return f, m
}

// Each API's response, whole and streamed, is right when it is the lone engine's, and is not when a byte of its text
// differs or its end is missing.
func TestTheJudgeSeesWhatIsWrong(t *testing.T) {
	for _, o := range orders("127.0.0.1:0")[:3] {
		for _, api := range o.apis {
			for _, stream := range []bool{false, true} {
				cut := cutAloud // a whole response ends short of its length, and the client's read fails
				if stream {
					cut = cutSilent
				}
				for want, gateway := range map[string]func(http.ResponseWriter, string){
					right: func(w http.ResponseWriter, s string) { _, _ = io.WriteString(w, s) },
					cut: func(w http.ResponseWriter, s string) {
						if !stream {
							w.Header().Set("Content-Length", strconv.Itoa(len(s)))
						}
						end := strings.LastIndex(strings.TrimSpace(s), "data: ")
						if api == apis.Messages { // message_stop, and nothing after it
							end = strings.LastIndex(s, "event: message_stop")
						}
						_, _ = io.WriteString(w, s[:max(end, len(s)/3)])
					},
					refused: func(w http.ResponseWriter, _ string) {
						w.WriteHeader(http.StatusServiceUnavailable)
						_, _ = io.WriteString(w, `{"error":{"message":"nobody is there","code":"no_endpoint"}}`)
					},
					lost: func(http.ResponseWriter, string) { panic(http.ErrAbortHandler) },
				} {
					f, m := scene(t, o, gateway)
					q := request{model: m, api: api, stream: stream}
					q.write(100, 12)
					tally := newTally()
					tally.shown = 10 // what is wrong here is meant to be
					got := f.send(t.Context(), q, 0, tally)
					assert.Equal(t, want, got, "%s %s, stream %t", o.name, api.Path, stream)
				}
			}
		}
	}
}

func TestTheJudgeSeesOtherText(t *testing.T) {
	o := orders("127.0.0.1:0")[0]
	for _, api := range o.apis {
		other := request{api: api, model: &model{order: o}}
		other.write(100, 12)
		f, m := scene(t, o, nil)
		q := request{model: m, api: api}
		q.write(100, 12)
		_, text, _, err := f.post(t.Context(), m.lone.URL(), other)
		require.NoError(t, err)
		verdict, why := f.judge(t.Context(), q, text)
		assert.Equal(t, wrong, verdict, "%s: %s", api.Path, why)
	}
	f, m := scene(t, o, nil)
	q := request{model: m, api: apis.Completions}
	q.write(100, 12)
	_, text, _, err := f.post(t.Context(), m.lone.URL(), q)
	require.NoError(t, err)
	said := apis.Read(strings.NewReader(text), false, nil).Text()
	short, err := sjson.Set(text, "choices.0.text", said[:6]) // not by its bytes: JSON escapes some
	require.NoError(t, err)
	require.Equal(t, said[:6], apis.Read(strings.NewReader(short), false, nil).Text())
	verdict, _ := f.judge(t.Context(), q, short)
	assert.Equal(t, cutSilent, verdict, "a response that is whole and lacks text")
	verdict, _ = f.judge(t.Context(), q, `{"error":{"message":"sorry"}}`)
	assert.True(t, bad(verdict), "an error with status 200 in place of a response: %s", verdict)
}

func TestTheJudgeSeesWhatErrorsMustNotSay(t *testing.T) {
	for body, want := range map[string]string{
		`{"error":{"message":"no pair","code":"no_endpoint"}}`:            refused,
		`{"error":{"message":"dial 10.77.0.3:8000 refused","code":"x"}}`:  wrong,
		`{"error":{"message":"http://127.77.3.1 is gone","type":"x"}}`:    wrong,
		`<html>Bad Gateway</html>`:                                        wrong,
		`{"type":"error","error":{"type":"api_error","message":"sorry"}}`: refused,
	} {
		verdict, _ := judgeError(502, body)
		assert.Equal(t, want, verdict, body)
	}
}

func TestAClientThatWaitsInVainHangs(t *testing.T) {
	o := orders("127.0.0.1:0")[0]
	gone := make(chan struct{})
	f, m := scene(t, o, func(http.ResponseWriter, string) { <-gone })
	f.patience = 50 * time.Millisecond
	q := newRequest(m, rand.New(rand.NewPCG(1, 1)), 100, 4)
	tally := newTally()
	tally.shown = 10
	assert.Equal(t, hung, f.send(context.Background(), q, 0, tally))
	assert.Equal(t, left, f.send(context.Background(), q, 10*time.Millisecond, tally))
	assert.Equal(t, 1, tally.count(hung))
	close(gone)
}
