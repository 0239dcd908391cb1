// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
)

// talk is a connector with bidirectional, and engines whose tokens are the bytes of the text.
type talk struct {
	t      *testing.T
	c      connector.KVConnector
	decode string // the ID of D
	render func(r *http.Request) (*http.Response, error)
	calls  []*http.Request
}

func newTalk(t *testing.T) *talk {
	return &talk{t: t, c: play.Open(t, nixl.Name, `{"bidirectional":true}`), decode: "d"}
}

// back is the handoff in D's response.
func back(n int) string {
	h, _ := sjson.Set(`{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[7,8]],`+
		`"remote_engine_id":"e-d","remote_request_id":"cmpl-9","remote_host":"10.0.0.2","remote_port":5601,`+
		`"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":0,"remote_blocks_expiry_time":1234.5,`+
		`"transfer_mode":"pull"}`, "remote_num_tokens", n)
	return h
}

// ids are the tokens of a text, which are its bytes.
func ids(text string) string {
	list := make([]int, len(text))
	for i := range list {
		list[i] = int(text[i])
	}
	raw, _ := json.Marshal(list)
	return string(raw)
}

func (k *talk) session(api connector.API, body string, header ...string) *connector.Session {
	s := play.Session(k.t, api, body)
	s.Prefill = play.Engine(k.t, "http://10.0.0.1:8100/base", discovery.RolePrefill, nil)
	s.Decode = discovery.Endpoint{ID: k.decode}
	s.Header = http.Header{"X-Session-Id": {"talk-1"}}
	for i := 0; i+1 < len(header); i += 2 {
		if s.Header.Del(header[i]); header[i+1] != "" {
			s.Header.Set(header[i], header[i+1])
		}
	}
	return s
}

// rendering is P's response to /render, in vLLM's form: the tokens of the prompt, in a list for completions.
func (k *talk) rendering(r *http.Request) (*http.Response, error) {
	k.calls = append(k.calls, r)
	if k.render != nil {
		return k.render(r)
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	out := `[{"token_ids":` + ids(gjson.GetBytes(body, "prompt").String()) + `,"features":null}]`
	if strings.Contains(r.URL.Path, "chat") {
		var all strings.Builder
		for _, m := range gjson.GetBytes(body, "messages").Array() {
			all.WriteString("<" + m.Get("content").String() + ">")
		}
		out = `{"token_ids":` + ids(all.String()+"<") + `}`
	}
	return responded(http.StatusOK, out), nil
}

func responded(status int, body string) *http.Response {
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body))}
}

// prefill calls Prepare and Prefill, and returns the leg's parameters.
func (k *talk) prefill(s *connector.Session) string {
	k.t.Helper()
	v, err := k.c.(connector.Preparer).Prepare(context.Background(), s, k.rendering)
	require.NoError(k.t, err)
	s.Prepared = v
	return gjson.Get(play.Prefill(k.t, k.c, s).Body, "kv_transfer_params").Raw
}

// respond gives D's whole response to the connector, and returns what the flow gets. It still has D's handoff,
// which the flow empties.
func (k *talk) respond(s *connector.Session, body string) string {
	k.t.Helper()
	return strings.Join(k.stream(s, body), "")
}

// stream gives the chunks of D's stream to the connector, and returns what the flow gets.
func (k *talk) stream(s *connector.Session, chunks ...string) (seen []string) {
	k.t.Helper()
	fn := k.c.(connector.Rewriter).Rewrite(s, nil)
	require.NotNil(k.t, fn)
	for _, chunk := range chunks {
		out, err := fn([]byte(chunk))
		require.NoError(k.t, err)
		seen = append(seen, string(out))
	}
	return seen
}

// completion is D's whole response, with the token ids that the connector asked for.
func completion(prompt, text, params string) string {
	return `{"id":"cmpl-1","choices":[{"index":0,"text":"` + text + `","token_ids":` + ids(text) +
		`,"prompt_token_ids":` + ids(prompt) + `}],"kv_transfer_params":` + params + `}`
}

const plain = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,` +
	`"remote_host":null,"remote_port":null}`

// spoken plays a first turn: prompt "abcd", response "efg". D has the KV of 6 of these tokens.
func (k *talk) spoken() {
	k.t.Helper()
	s := k.session(connector.APICompletions, `{"prompt":"abcd"}`)
	require.JSONEq(k.t, plain, k.prefill(s))
	k.respond(s, completion("abcd", "efg", back(6)))
}

func (k *talk) next(prompt string, header ...string) string {
	k.t.Helper()
	return k.prefill(k.session(connector.APICompletions, `{"prompt":"`+prompt+`"}`, header...))
}

func TestTheNextTurnTakesTheLastOnesKV(t *testing.T) {
	k := newTalk(t)
	k.spoken()
	assert.Equal(t, back(6), k.next("abcdefgh"), "D's own handoff, to the byte")
	require.Len(t, k.calls, 1)
	assert.Equal(t, "http://10.0.0.1:8100/base/v1/completions/render", k.calls[0].URL.String())
	assert.Equal(t, plain, k.next("abcdefgh"), "D gives its KV once")
	assert.Len(t, k.calls, 1, "nobody is asked where nothing is remembered")
}

// These are the recorded requests and responses of real engines, leg by leg. P took the KV of as many tokens from D,
// and the text was the same as that of one engine alone.
func TestRecordedTurns(t *testing.T) {
	files, err := filepath.Glob("testdata/turns/vllm-0.32.0/*.json")
	require.NoError(t, err)
	require.Len(t, files, 2)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			raw, err := os.ReadFile(file)
			require.NoError(t, err)
			var r struct {
				Path                                                         string
				Request, Decode, DecodeResponse, Next, Rendered, NextPrefill json.RawMessage
				Taken                                                        int
			}
			require.NoError(t, json.Unmarshal(raw, &r))
			k := newTalk(t)
			s := k.session(connector.APIOf(r.Path), string(r.Request))
			k.prefill(s)
			first := play.Decode(t, k.c, s, play.Response(`{"kv_transfer_params":`+
				gjson.GetBytes(r.Decode, "kv_transfer_params").Raw+`}`))
			assert.Equal(t, string(r.Decode), first.Body)
			seen := k.respond(s, string(r.DecodeResponse))
			want := string(r.DecodeResponse)
			for _, path := range []string{"choices.0.token_ids", promptIDs(s.API)} {
				want, err = sjson.SetRaw(want, path, "null")
				require.NoError(t, err)
			}
			assert.Equal(t, want, seen)

			k.render = func(*http.Request) (*http.Response, error) {
				return responded(http.StatusOK, string(r.Rendered)), nil
			}
			next := k.session(s.API, string(r.Next))
			require.NotEqual(t, plain, k.prefill(next))
			assert.Equal(t, string(r.NextPrefill), play.Prefill(t, k.c, next).Body)
			assert.Positive(t, r.Taken)
		})
	}
}

func promptIDs(api connector.API) string {
	if api == connector.APIChat {
		return "prompt_token_ids"
	}
	return "choices.0.prompt_token_ids"
}

func TestAChatsNextTurn(t *testing.T) {
	k := newTalk(t)
	s := k.session(connector.APIChat, `{"messages":[{"role":"user","content":"ab"}]}`)
	k.prefill(s)
	response := `{"choices":[{"message":{"content":"cd"},"token_ids":` + ids("cd>") + `}],"prompt_token_ids":` +
		ids("<ab><") + `,"kv_transfer_params":` + back(7) + `}`
	assert.JSONEq(t, `{"choices":[{"message":{"content":"cd"},"token_ids":null}],"prompt_token_ids":null,`+
		`"kv_transfer_params":`+back(7)+`}`, k.respond(s, response))
	next := k.session(connector.APIChat, `{"messages":[{"role":"user","content":"ab"},{"role":"assistant",`+
		`"content":"cd"},{"role":"user","content":"ef"}]}`)
	assert.Equal(t, back(7), k.prefill(next))
	assert.Equal(t, "/base/v1/chat/completions/render", k.calls[0].URL.Path)
}

func TestGenerateNeedsNoRendering(t *testing.T) {
	k := newTalk(t)
	k.respond(k.session(connector.APIGenerate, `{"token_ids":[1,2,3]}`),
		`{"choices":[{"token_ids":[4,5]}],"kv_transfer_params":`+back(4)+`}`)
	assert.Equal(t, back(4), k.prefill(k.session(connector.APIGenerate, `{"token_ids":[1,2,3,4,9,9]}`)))
	assert.Empty(t, k.calls)
}

// P compares nothing, so a prompt that is not proven to extend the turn is prefilled in the plain way.
func TestPromptsThatDoNotProvablyExtendTheTurn(t *testing.T) {
	for rule, prompt := range map[string]string{
		"another beginning": "Xbcdefgh", "another output": "abcdeXgh", "shorter than what D has": "abcde",
		"no longer than what D has": "abcdef",
	} {
		t.Run(rule, func(t *testing.T) {
			k := newTalk(t)
			k.spoken()
			assert.Equal(t, plain, k.next(prompt))
			assert.Equal(t, back(6), k.next("abcdefgh"), "the turn is still there for the one that does")
		})
	}
	t.Run("the last output's last token counts only if D has its KV", func(t *testing.T) {
		k := newTalk(t)
		k.spoken()
		assert.Equal(t, back(6), k.next("abcdefXh"))
	})
}

func TestTurnsOfOthersAreNotTaken(t *testing.T) {
	k := newTalk(t)
	k.spoken()
	for rule, s := range map[string]*connector.Session{
		"another conversation": k.session(connector.APICompletions, `{"prompt":"abcdefgh"}`, "X-Session-ID",
			"talk-2"),
		"no conversation": k.session(connector.APICompletions, `{"prompt":"abcdefgh"}`, "X-Session-ID", ""),
		"a name that is too long": k.session(connector.APICompletions, `{"prompt":"abcdefgh"}`, "X-Session-ID",
			strings.Repeat("x", 257)),
		"another model":            k.session(connector.APICompletions, `{"model":"adapter","prompt":"abcdefgh"}`),
		"another cache salt":       k.session(connector.APICompletions, `{"prompt":"abcdefgh","cache_salt":"s"}`),
		"an API without token ids": k.session(connector.APIMessages, `{"messages":[]}`),
		"a prompt of embeddings":   k.session(connector.APICompletions, `{"prompt":"abcdefgh","prompt_embeds":"x"}`),
	} {
		assert.Equal(t, plain, k.prefill(s), rule)
	}
	k.decode = "d2"
	assert.Equal(t, plain, k.next("abcdefgh"), "only the pick of the same decode engine shows that it is still there")
	k.decode = "d"
	assert.Equal(t, back(6), k.next("abcdefgh"))
}

func TestPrefillGoesOnWhateverRenderResponds(t *testing.T) {
	for rule, render := range map[string]func(*http.Request) (*http.Response, error){
		"not served":  func(*http.Request) (*http.Response, error) { return responded(404, `{"error":{}}`), nil },
		"unreachable": func(*http.Request) (*http.Response, error) { return nil, errors.New("refused") },
		"garbage":     func(*http.Request) (*http.Response, error) { return responded(200, `<html>`), nil },
		"other JSON": func(*http.Request) (*http.Response, error) {
			return responded(200, `{"token_ids":"abcdefgh"}`), nil
		},
		"negative tokens": func(*http.Request) (*http.Response, error) {
			return responded(200, `[{"token_ids":[-1]}]`), nil
		},
		"several prompts": func(*http.Request) (*http.Response, error) {
			return responded(200, `[{"token_ids":[1]},{"token_ids":[1]}]`), nil
		},
		"no prompt": func(*http.Request) (*http.Response, error) { return responded(200, `[]`), nil },
		"media, told so": func(*http.Request) (*http.Response, error) {
			return responded(200, `[{"token_ids":`+ids("abcdefgh")+`,"features":{"mm_hashes":{}}}]`), nil
		},
		"parts of content": func(*http.Request) (*http.Response, error) {
			return responded(200, `[{"token_ids":`+ids("abcdefgh")+`,"content_parts":[{}]}]`), nil
		},
	} {
		t.Run(rule, func(t *testing.T) {
			k := newTalk(t)
			k.spoken()
			k.render = render
			assert.Equal(t, plain, k.next("abcdefgh"))
		})
	}
}

func TestARenderThatDoesNotEndEndsWithItsContext(t *testing.T) {
	k := newTalk(t)
	k.spoken()
	ctx, cancel := context.WithCancel(t.Context())
	_, err := k.c.(connector.Preparer).Prepare(ctx, k.session(connector.APICompletions, `{"prompt":"abcdefgh"}`),
		func(r *http.Request) (*http.Response, error) {
			cancel()
			<-r.Context().Done()
			return nil, r.Context().Err()
		})
	require.ErrorIs(t, err, context.Canceled)
}

func TestResponsesThatAreNotRemembered(t *testing.T) {
	for rule, response := range map[string]string{
		"no handoff (bidirectional_kv_xfer is off)": completion("abcd", "efg", "null"),
		"P's kind of handoff": completion("abcd", "efg",
			strings.Replace(strings.Replace(back(6), `"do_remote_decode":true`, `"do_remote_decode":false`, 1),
				`"do_remote_prefill":false`, `"do_remote_prefill":true`, 1)),
		"no blocks": completion("abcd", "efg",
			strings.Replace(back(6), "[[7,8]]", "[[]]", 1)),
		"no address": completion("abcd", "efg",
			strings.Replace(back(6), `"10.0.0.2"`, "null", 1)),
		"more tokens than were told": completion("abcd", "efg", back(500)),
		"no tokens":                  completion("abcd", "efg", back(0)),
		"no token ids": `{"choices":[{"text":"efg"}],"kv_transfer_params":` + back(6) +
			`}`,
		"not JSON": `data: {}`,
		"an error": `{"error":{"message":"x"}}`,
		"a handoff that is too large": completion("abcd", "efg",
			strings.Replace(back(6), "[[7,8]]", "[["+strings.Repeat("7,", 40000)+"8]]", 1)),
	} {
		t.Run(rule, func(t *testing.T) {
			k := newTalk(t)
			s := k.session(connector.APICompletions, `{"prompt":"abcd"}`)
			k.prefill(s)
			k.respond(s, response)
			assert.Equal(t, plain, k.next("abcdefgh"))
		})
	}
}

func TestTheClientSeesNothingOfIt(t *testing.T) {
	k := newTalk(t)
	s := k.session(connector.APICompletions, `{"prompt":"abcd"}`)
	assert.JSONEq(t, `{"id":"cmpl-1","choices":[{"index":0,"text":"efg","token_ids":null,"prompt_token_ids":null}],`+
		`"kv_transfer_params":`+back(6)+`}`,
		k.respond(s, completion("abcd", "efg", back(6))))
	asked := k.session(connector.APICompletions, `{"prompt":"abcd","return_token_ids":true}`)
	assert.Equal(t, completion("abcd", "efg", back(6)), k.respond(asked, completion("abcd", "efg", back(6))),
		"token ids stay for the client that asked for them")
	const odd = `{"choices":[{"text":"e\u0066g"}], "usage":{"x":1.50}}`
	assert.Equal(t, odd, k.respond(s, odd), "and nothing else is touched")
}

// The connector does not read a response whose KV the next turn cannot use. The flow still removes D's handoff from it,
// so a host must not relay it.
func TestResponsesThatAreNotOfUseAreNotParsed(t *testing.T) {
	k := newTalk(t)
	for rule, s := range map[string]*connector.Session{
		"no conversation":          k.session(connector.APIChat, `{"messages":[]}`, "X-Session-ID", ""),
		"an API without token ids": k.session(connector.APIMessages, `{"messages":[]}`),
		"responses":                k.session(connector.APIResponses, `{"input":"x","stream":true}`),
		"a stream that does not say where D's KV is": k.session(connector.APIGenerate,
			`{"token_ids":[1],"stream":true}`),
	} {
		assert.Nil(t, k.c.(connector.Rewriter).Rewrite(s, nil), rule)
	}
}

// streamed are the chunks of a completion whose output comes in two parts, as vLLM 0.33.0 sends them.
func streamed(prompt, one, two, params string) []string {
	return []string{
		`{"choices":[{"text":"` + one + `","prompt_token_ids":` + ids(prompt) + `,"token_ids":` + ids(one) +
			`}],"kv_transfer_params":null}`,
		`{"choices":[{"text":"` + two + `","prompt_token_ids":null,"token_ids":` + ids(two) +
			`,"finish_reason":"stop"}],"kv_transfer_params":` + params + `}`,
		`{"choices":[],"usage":{"prompt_tokens":4}}`,
	}
}

func TestTheNextTurnTakesTheKVOfAStream(t *testing.T) {
	k := newTalk(t)
	s := k.session(connector.APICompletions, `{"prompt":"abcd","stream":true}`)
	assert.Equal(t, []string{
		`{"choices":[{"text":"ef","prompt_token_ids":null,"token_ids":null}],"kv_transfer_params":null}`,
		`{"choices":[{"text":"g","prompt_token_ids":null,"token_ids":null,"finish_reason":"stop"}],` +
			`"kv_transfer_params":` + back(6) + `}`,
		`{"choices":[],"usage":{"prompt_tokens":4}}`,
	}, k.stream(s, streamed("abcd", "ef", "g", back(6))...))
	assert.Equal(t, plain, k.next("abcdeXgh"), "another output")
	assert.Equal(t, back(6), k.next("abcdefgh"))

	asked := k.session(connector.APICompletions, `{"prompt":"abcd","stream":true,"return_token_ids":true}`)
	assert.Equal(t, streamed("abcd", "ef", "g", back(6)), k.stream(asked, streamed("abcd", "ef", "g", back(6))...),
		"token ids stay for the client that asked for them")

	chat := k.session(connector.APIChat, `{"messages":[{"role":"user","content":"ab"}],"stream":true}`)
	k.stream(chat, `{"choices":[{"delta":{"role":"assistant","content":""}}],"prompt_token_ids":`+ids("<ab><")+`}`,
		`{"choices":[{"delta":{"content":"c"},"token_ids":`+ids("c")+`}],"kv_transfer_params":null}`,
		`{"choices":[{"delta":{"content":"d"},"token_ids":`+ids("d>")+`}],"kv_transfer_params":`+back(7)+`}`)
	assert.Equal(t, back(7), k.prefill(k.session(connector.APIChat, `{"messages":[{"role":"user","content":"ab"},`+
		`{"role":"assistant","content":"cd"},{"role":"user","content":"ef"}]}`)))
}

func TestStreamsThatAreNotRemembered(t *testing.T) {
	all := streamed("abcd", "ef", "g", back(6))
	for rule, chunks := range map[string][]string{
		"cut before its end":        all[:1],
		"no handoff (before 0.33)":  streamed("abcd", "ef", "g", "null"),
		"without its first chunk":   all[1:],
		"a chunk without token ids": {`{"choices":[{"prompt_token_ids":` + ids("abcd") + `}]}`, all[1]},
		"ids that are none": {all[0], `{"choices":[{"text":"","token_ids":"x"}]}`,
			all[1]},
		"a last chunk that is not JSON": {all[0], strings.TrimSuffix(all[1], "}")},
	} {
		t.Run(rule, func(t *testing.T) {
			k := newTalk(t)
			k.stream(k.session(connector.APICompletions, `{"prompt":"abcd","stream":true}`), chunks...)
			assert.Equal(t, plain, k.next("abcdefgh"))
		})
	}
}

func TestDecodeAsksForTokenIDsWhereTheyAreOfUse(t *testing.T) {
	k := newTalk(t)
	leg := func(s *connector.Session) string {
		return play.Decode(t, k.c, s, play.Response(`{"kv_transfer_params":`+good+`}`)).Body
	}
	assert.Equal(t, `{"prompt":"x","kv_transfer_params":`+good+`,"return_token_ids":true}`,
		leg(k.session(connector.APICompletions, `{"prompt":"x"}`)))
	assert.Contains(t, leg(k.session(connector.APIChat, `{"messages":[],"stream":true}`)), `"return_token_ids":true`)
	for rule, s := range map[string]*connector.Session{
		"tokens streamed": k.session(connector.APIGenerate, `{"token_ids":[1],"stream":true}`),
		"no conversation": k.session(connector.APICompletions, `{"prompt":"x"}`, "X-Session-ID", ""),
		"tokens out":      k.session(connector.APIGenerate, `{"token_ids":[1]}`),
	} {
		assert.NotContains(t, leg(s), "return_token_ids", rule)
	}
}

func TestTurnsExpireBeforeD_LetsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newTalk(t)
		k.spoken()
		time.Sleep(450*time.Second - time.Millisecond)
		assert.Equal(t, back(6), k.next("abcdefgh"), "480 s less 30 for P's queue")
		k.spoken()
		time.Sleep(450 * time.Second)
		assert.Equal(t, plain, k.next("abcdefgh"))
	})
}

func TestAShortTimeIsHalved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newTalk(t)
		k.c = play.Open(t, nixl.Name, `{"bidirectional":true,"conversationTTL":"20s","conversationHeader":"X-Talk"}`)
		s := k.session(connector.APICompletions, `{"prompt":"abcd"}`, "X-Talk", "1")
		k.respond(s, completion("abcd", "efg", back(6)))
		time.Sleep(10*time.Second - time.Millisecond)
		assert.Equal(t, back(6), k.next("abcdefgh", "X-Talk", "1"))
		k.respond(s, completion("abcd", "efg", back(6)))
		time.Sleep(10 * time.Second)
		assert.Equal(t, plain, k.next("abcdefgh", "X-Talk", "1"))
	})
}

// Two requests of one conversation come at once: only one of them gets the KV.
func TestATurnIsTakenOnce(t *testing.T) {
	k := newTalk(t)
	k.spoken()
	var wg sync.WaitGroup
	var mu sync.Mutex
	taken := 0
	for range 16 {
		wg.Go(func() {
			s := k.session(connector.APICompletions, `{"prompt":"abcdefgh"}`)
			v, err := k.c.(connector.Preparer).Prepare(context.Background(), s,
				func(*http.Request) (*http.Response, error) {
					return responded(200, `[{"token_ids":`+ids("abcdefgh")+`}]`), nil
				})
			assert.NoError(t, err)
			if v != nil {
				mu.Lock()
				taken++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 1, taken)
}

// The memory is bounded: when it is full, the oldest turn is forgotten.
func TestTheMemoryIsBounded(t *testing.T) {
	k := newTalk(t)
	const most = 4096
	say := func(name string) {
		k.respond(k.session(connector.APICompletions, `{"prompt":"abcd"}`, "X-Session-ID", name),
			completion("abcd", "efg", back(6)))
	}
	say("first")
	for i := range most {
		say("n" + string(rune('a'+i%26)) + time.Duration(i).String())
	}
	assert.Equal(t, plain, k.next("abcdefgh", "X-Session-ID", "first"))
	assert.Equal(t, back(6), k.next("abcdefgh", "X-Session-ID", "nb"+time.Duration(1).String()))
}

// A client may send a cache salt of any length, and the engine accepts it.
func TestLongSaltsCostNoMemory(t *testing.T) {
	k := newTalk(t)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for i := range 64 {
		body := `{"prompt":"abcd","cache_salt":"` + strings.Repeat("s", 1<<19) + strconv.Itoa(i) + `"}`
		k.respond(k.session(connector.APICompletions, body), completion("abcd", "efg", back(6)))
	}
	assert.Less(t, heap(), before+8<<20)
	assert.Equal(t, back(6), k.prefill(k.session(connector.APICompletions, `{"prompt":"abcdefgh","cache_salt":"`+
		strings.Repeat("s", 1<<19)+`7"}`)))
}

func TestOffByDefault(t *testing.T) {
	c := play.Open(t, nixl.Name, ``)
	_, prepares := connector.As[connector.Preparer](c)
	_, rewrites := connector.As[connector.Rewriter](c)
	assert.False(t, prepares || rewrites, "nothing is asked, and responses are left unparsed")
}

func TestConformanceOfConversations(t *testing.T) {
	h := harness
	h.Config = json.RawMessage(`{"bidirectional":true,"conversationTTL":"90s","conversationHeader":"X-Conversation"}`)
	connectortest.Run(t, h)
}
