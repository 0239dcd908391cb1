// SPDX-License-Identifier: Apache-2.0

package prompttokens_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/prompttokens"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func engines(t *testing.T, urls ...string) *discovery.Set {
	t.Helper()
	var all []discovery.Endpoint
	for _, url := range urls {
		e, err := discovery.New(url, discovery.RoleDecode)
		require.NoError(t, err)
		all = append(all, e)
	}
	set, err := static.NewSet(all...)
	require.NoError(t, err)
	return set
}

func request(t *testing.T, api connector.API, body string) *connector.ClientRequest {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return r
}

type roundTripper func(r *http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func answer(status int, body string) *http.Response {
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body))}
}

func TestEnginesRenderThePrompt(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	defer e.Close()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	for _, lacks := range []bool{false, true} { // …/render
		c := prompttokens.New(engines(t, e.URL()), &prompttokens.Options{Timeout: 5 * time.Second,
			Client: roundTripper(func(r *http.Request) (*http.Response, error) {
				if lacks && strings.HasSuffix(r.URL.Path, "/render") {
					_ = r.Body.Close()
					return answer(404, "{}"), nil
				}
				return transport.RoundTrip(r)
			})})
		ids, exact, err := c.Tokens(t.Context(), request(t, connector.APICompletions,
			`{"model":"tiny","prompt":"AB","stream":true,"kv_transfer_params":{"x":1}}`))
		require.NoError(t, err)
		assert.Equal(t, []uint32{'A', 'B'}, ids)
		assert.True(t, exact)
		chat := request(t, connector.APIChat, `{"model":"tiny","messages":[{"role":"user","content":"hi"}]}`)
		ids, exact, err = c.Tokens(t.Context(), chat)
		require.NoError(t, err)
		assert.Contains(t, fmt.Sprint(ids), "104 105")
		assert.True(t, exact)
		before := c.Counts().Asked
		again, _, err := c.Tokens(t.Context(), chat)
		require.NoError(t, err)
		assert.Equal(t, ids, again)
		assert.Equal(t, before, c.Counts().Asked, "it is known")
		_, _, err = c.Tokens(t.Context(), request(t, connector.APICompletions, `{"model":"other","prompt":"AB"}`))
		assert.ErrorIs(t, err, prompttokens.ErrUnsupported)
	}
}

func TestTokensThatTheRequestGivesNeedNobody(t *testing.T) {
	c := prompttokens.New(discovery.NewSet(), nil)
	for api, body := range map[connector.API]string{
		connector.APICompletions: `{"model":"m","prompt":[1,2,70000]}`,
		connector.APIGenerate:    `{"model":"m","token_ids":[1,2,70000]}`,
		connector.APISGLang:      `{"input_ids":[1,2,70000],"text":null}`,
	} {
		ids, exact, err := c.Tokens(t.Context(), request(t, api, body))
		require.NoError(t, err)
		assert.Equal(t, []uint32{1, 2, 70000}, ids)
		assert.True(t, exact)
	}
	_, _, err := c.Tokens(t.Context(), request(t, connector.APISGLang, `{"text":"a"}`))
	require.ErrorIs(t, err, prompttokens.ErrNoEngine, "nobody is there to say that it has no way to ask")
	_, _, err = c.Tokens(t.Context(), request(t, connector.APICompletions, `{"model":"m","prompt":"a"}`))
	assert.ErrorIs(t, err, prompttokens.ErrNoEngine)
}

// A request whose tokens nobody can be asked for costs nothing.
func TestWithoutEnginesNothingIsHashed(t *testing.T) {
	c := prompttokens.New(discovery.NewSet(), nil)
	r := request(t, connector.APIChat, `{"model":"m","messages":[{"role":"user","content":"x"}]}`)
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _, _ = c.Tokens(t.Context(), r) }))
	_, _, err := c.Tokens(t.Context(), r)
	assert.ErrorIs(t, err, prompttokens.ErrNoEngine)
}

// An engine's key may guard /v1 alone.
func TestTokenizeIsAskedWhereRenderIsForbidden(t *testing.T) {
	for _, status := range []int{401, 403} {
		var asked []string
		c := prompttokens.New(engines(t, "http://127.0.0.1:1"), &prompttokens.Options{Timeout: 20 * time.Second,
			Client: roundTripper(func(r *http.Request) (*http.Response, error) {
				if asked = append(asked, r.URL.Path); r.URL.Path == "/tokenize" {
					return answer(200, `{"tokens":[1,2]}`), nil
				}
				return answer(status, `{}`), nil
			})})
		for _, prompt := range []string{"a", "b"} {
			ids, exact, err := c.Tokens(t.Context(), request(t, connector.APICompletions,
				`{"model":"m","prompt":"`+prompt+`"}`))
			require.NoError(t, err)
			assert.Equal(t, []uint32{1, 2}, ids)
			assert.True(t, exact)
		}
		assert.Equal(t, []string{"/v1/completions/render", "/tokenize", "/tokenize"}, asked)
	}
}

func TestEnginesThatForbidAllAreLeftInPeace(t *testing.T) {
	for _, status := range []int{401, 403} {
		c := prompttokens.New(engines(t, "http://127.0.0.1:1"), &prompttokens.Options{Timeout: 20 * time.Second,
			Client: roundTripper(func(*http.Request) (*http.Response, error) { return answer(status, `{}`), nil })})
		for i := range 5 {
			_, _, err := c.Tokens(t.Context(), request(t, connector.APICompletions,
				fmt.Sprintf(`{"model":"m","prompt":"%d"}`, i)))
			assert.ErrorIs(t, err, []error{prompttokens.ErrFailed, prompttokens.ErrPaused}[i/3])
		}
		assert.EqualValues(t, 3, c.Counts().Failed)
	}
}

// Only text has tokens that nothing else is mixed into.
func TestImagesAreNotExact(t *testing.T) {
	for path, body := range map[string]string{
		"/render":   `{"token_ids":[1,2],"features":{"kwargs_data":{}}}`,
		"/tokenize": `{"tokens":[1,2],"count":2}`,
	} {
		c := prompttokens.New(engines(t, "http://127.0.0.1:1"), &prompttokens.Options{
			Client: roundTripper(func(r *http.Request) (*http.Response, error) {
				if strings.HasSuffix(r.URL.Path, path) {
					return answer(200, body), nil
				}
				return answer(404, ""), nil
			})})
		ids, exact, err := c.Tokens(t.Context(), request(t, connector.APIChat,
			`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`))
		require.NoError(t, err)
		assert.Equal(t, []uint32{1, 2}, ids)
		assert.False(t, exact, path)
	}
}

func TestOneQuestionIsAskedForAllThatWantTheSame(t *testing.T) {
	var asked atomic.Int64
	release := make(chan struct{})
	c := prompttokens.New(engines(t, "http://127.0.0.1:1"), &prompttokens.Options{Timeout: 20 * time.Second,
		Client: roundTripper(func(r *http.Request) (*http.Response, error) {
			asked.Add(1)
			select {
			case <-release:
			case <-r.Context().Done():
				return nil, r.Context().Err()
			}
			return answer(200, `{"token_ids":[7]}`), nil
		})})
	r := request(t, connector.APIChat, `{"model":"m","messages":[{"role":"user","content":"x"}]}`)
	leaving, leave := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		_, _, err := c.Tokens(leaving, r)
		assert.ErrorIs(t, err, context.Canceled)
	})
	require.Eventually(t, func() bool { return asked.Load() == 1 }, 10*time.Second, time.Millisecond)
	for range 5 {
		running.Go(func() {
			ids, _, err := c.Tokens(t.Context(), r)
			assert.NoError(t, err)
			assert.Equal(t, []uint32{7}, ids)
		})
	}
	require.Eventually(t, func() bool { return c.Counts().Hits == 5 }, 10*time.Second, time.Millisecond)
	leave() // the first one: another one asks
	require.Eventually(t, func() bool { return asked.Load() == 2 }, 10*time.Second, time.Millisecond)
	close(release)
	running.Wait()
	assert.EqualValues(t, 2, asked.Load())
	assert.Zero(t, c.Counts().Failed, "a client that leaves is no failure")
}

func TestTheTimeIsBoundedAndFailuresPause(t *testing.T) {
	var asked atomic.Int64
	c := prompttokens.New(engines(t, "http://127.0.0.1:1"), &prompttokens.Options{Timeout: 20 * time.Millisecond,
		Client: roundTripper(func(r *http.Request) (*http.Response, error) {
			asked.Add(1)
			<-r.Context().Done()
			return nil, r.Context().Err()
		})})
	for i := range 5 {
		r := request(t, connector.APICompletions, fmt.Sprintf(`{"model":"m","prompt":"secret%d"}`, i))
		_, _, err := c.Tokens(t.Context(), r)
		require.Error(t, err)
		assert.NotContains(t, err.Error(), "secret")
		if i < 3 {
			assert.ErrorIs(t, err, prompttokens.ErrFailed)
		} else {
			assert.ErrorIs(t, err, prompttokens.ErrPaused)
		}
	}
	assert.EqualValues(t, 3, asked.Load())
	assert.EqualValues(t, 3, c.Counts().Failed)
}

func TestAnswersThatMakeNoSense(t *testing.T) {
	for name, a := range map[string]*http.Response{
		"no JSON":   answer(200, "x"),
		"no tokens": answer(200, `{}`),
		"text":      answer(200, `{"token_ids":["a"]}`),
		"negative":  answer(200, `{"token_ids":[-1]}`),
		"an error":  answer(500, `{}`),
		"endless":   {StatusCode: 200, Body: io.NopCloser(bytes.NewReader(make([]byte, 17<<20)))},
	} {
		c := prompttokens.New(engines(t, "http://127.0.0.1:1"), &prompttokens.Options{Timeout: 10 * time.Second,
			Client: roundTripper(func(*http.Request) (*http.Response, error) { return a, nil })})
		_, _, err := c.Tokens(t.Context(), request(t, connector.APICompletions, `{"model":"m","prompt":"x"}`))
		assert.ErrorIs(t, err, prompttokens.ErrFailed, name)
	}
	panics := prompttokens.New(engines(t, "http://127.0.0.1:1"), &prompttokens.Options{
		Client: roundTripper(func(*http.Request) (*http.Response, error) { return nil, errors.New("at 10.1.2.3") })})
	_, _, err := panics.Tokens(t.Context(), request(t, connector.APICompletions, `{"model":"m","prompt":"x"}`))
	assert.NotContains(t, err.Error(), "10.1.2.3")
}

func TestTheCacheIsBoundedByBytes(t *testing.T) {
	var asked atomic.Int64
	long := "[" + strings.Repeat("1,", 999) + "1]"
	c := prompttokens.New(engines(t, "http://127.0.0.1:1"), &prompttokens.Options{CacheBytes: 3 * 4400,
		Client: roundTripper(func(*http.Request) (*http.Response, error) {
			asked.Add(1)
			return answer(200, `{"token_ids":`+long+`}`), nil
		})})
	ask := func(prompts ...string) int64 {
		asked.Store(0)
		for _, p := range prompts {
			_, _, err := c.Tokens(t.Context(), request(t, connector.APICompletions, `{"model":"m","prompt":"`+p+`"}`))
			require.NoError(t, err)
		}
		return asked.Load()
	}
	assert.EqualValues(t, 2, ask("a", "b"))
	assert.EqualValues(t, 0, ask("a"))
	assert.EqualValues(t, 2, ask("c", "d"), "b makes room, then a or c")
	assert.EqualValues(t, 1, ask("d", "b"))
}

// A path that an engine lacks, and a model that it lacks, are no reason to ask for others otherwise: see
// llm-d/llm-d-router#1861.
func TestWhatAnEngineLacksIsThePathOrTheModel(t *testing.T) {
	var paths []string
	const model = `{"error":{"message":"The model does not exist.","type":"NotFoundError","code":404}}`
	c := prompttokens.New(engines(t, "http://a:1", "http://b:1"), &prompttokens.Options{Client: roundTripper(
		func(r *http.Request) (*http.Response, error) {
			body, _ := io.ReadAll(r.Body)
			paths = append(paths, r.URL.Host+r.URL.Path)
			switch {
			case strings.Contains(string(body), "lora") && r.URL.Host == "a:1":
				return answer(404, model), nil
			case r.URL.Path == "/v1/messages/render":
				return answer(404, `{"detail":"Not Found"}`), nil
			}
			return answer(200, `{"token_ids":[1,2],"features":null}`), nil
		})})
	ask := func(api connector.API, model string, n int) error {
		_, _, err := c.Tokens(t.Context(), request(t, api, fmt.Sprintf(
			`{"model":%q,"max_tokens":1,"messages":[{"role":"user","content":"%d"}]}`, model, n)))
		return err
	}
	for n := range 4 {
		require.ErrorIs(t, ask(connector.APIMessages, "m", n), prompttokens.ErrUnsupported)
		require.NoError(t, ask(connector.APIChat, "lora", n), "another engine has it")
	}
	paths = nil
	for n := range 4 {
		require.ErrorIs(t, ask(connector.APIMessages, "m", 10+n), prompttokens.ErrUnsupported)
		require.NoError(t, ask(connector.APIChat, "m", n))
	}
	require.Len(t, paths, 4)
	one := prompttokens.New(engines(t, "http://a:1"), &prompttokens.Options{Client: roundTripper(
		func(*http.Request) (*http.Response, error) {
			paths = append(paths, "again")
			return answer(404, model), nil
		})})
	_, _, err := one.Tokens(t.Context(), request(t, connector.APIChat, `{"model":"lora","messages":[{"role":"user"}]}`))
	require.ErrorIs(t, err, prompttokens.ErrUnsupported)
	require.Len(t, paths, 5, "the only engine is asked once")
	paths = paths[:4]
	for _, path := range paths {
		assert.Contains(t, path, "/v1/chat/completions/render")
	}
}
