// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// obj is a JSON object.
type obj = map[string]any

// answer is what a client sees of a response.
type answer struct {
	status int
	header http.Header
	body   string
	err    error
}

func (a answer) get(path string) gjson.Result { return gjson.Get(a.body, path) }

// text is the answer of one choice, whichever API it came by.
func (a answer) text() string {
	if c := a.get("choices.0.message.content"); c.Exists() {
		return c.String()
	}
	return a.get("choices.0.text").String()
}

// events are the data of a stream's events.
func (a answer) events() []string {
	var out []string
	for line := range strings.SplitSeq(a.body, "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			out = append(out, data)
		}
	}
	return out
}

type client struct {
	t    testing.TB
	http *http.Client
}

func newClient(t testing.TB) *client {
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return &client{t: t, http: &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
}

func (c *client) post(ctx context.Context, e *enginesim.Engine, path string, body any, headers ...string) answer {
	c.t.Helper()
	data, ok := body.(string)
	if !ok {
		b, err := json.Marshal(body)
		require.NoError(c.t, err)
		data = string(b)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+path, bytes.NewReader([]byte(data)))
	require.NoError(c.t, err)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return c.do(r)
}

func (c *client) get(e *enginesim.Engine, path string) answer {
	c.t.Helper()
	r, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, e.URL()+path, nil)
	require.NoError(c.t, err)
	return c.do(r)
}

func (c *client) do(r *http.Request) answer {
	resp, err := c.http.Do(r)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: string(data), err: err}
}

// scene is a pair of engines, one more that serves alone, and a client.
type scene struct {
	*client
	t       testing.TB
	p, d, o *enginesim.Engine
}

// block is the block size of all scenes, that of the recorded exchanges.
const block = 32

func newScene(t testing.TB, shape ...func(p, d *enginesim.Config)) *scene {
	t.Helper()
	p := enginesim.Config{BlockSize: block, MaxModelLen: 2048, Blocks: 256, HandshakeTimeout: 300 * time.Millisecond}
	d := enginesim.Config{HandshakeTimeout: 300 * time.Millisecond}
	for _, f := range shape {
		f(&p, &d)
	}
	alone := p
	alone.Connector, alone.KVRole = "none", enginesim.RoleBoth
	// Enough that nothing is evicted or preempted.
	alone.Blocks = max(alone.Blocks, 64<<10/max(alone.BytesPerToken, 16))
	s := &scene{client: newClient(t), t: t}
	var err error
	s.p, s.d, err = enginesim.Pair(p, d)
	require.NoError(t, err)
	s.o, err = enginesim.Start(alone)
	require.NoError(t, err)
	t.Cleanup(func() {
		s.http.CloseIdleConnections()
		for _, e := range []*enginesim.Engine{s.p, s.d, s.o} {
			assert.NoError(t, e.Close())
		}
	})
	return s
}

func prompt(n int, name string) string {
	return (name + strings.Repeat(" The quick brown fox jumps over the lazy dog", n/40+1))[:n]
}

func with(base obj, more obj) obj {
	out := obj{}
	maps.Copy(out, base)
	maps.Copy(out, more)
	return out
}

const completions, chat = "/v1/completions", "/v1/chat/completions"

// prefill runs the prefill leg and gives the handoff.
func (s *scene) prefill(path string, body obj) obj {
	s.t.Helper()
	a := s.post(s.t.Context(), s.p, path, with(body, obj{"max_tokens": 1, "stream": false, "kv_transfer_params": obj{"do_remote_decode": true}}))
	require.NoError(s.t, a.err)
	require.Equal(s.t, 200, a.status, a.body)
	h := obj{}
	require.NoError(s.t, json.Unmarshal([]byte(a.get("kv_transfer_params").Raw), &h))
	return h
}

func (s *scene) decode(path string, body, handoff obj) answer {
	s.t.Helper()
	return s.post(s.t.Context(), s.d, path, with(body, obj{"kv_transfer_params": handoff}))
}

// alone is the text that one engine gives.
func (s *scene) alone(path string, body obj) string {
	s.t.Helper()
	a := s.post(s.t.Context(), s.o, path, body)
	require.Equal(s.t, 200, a.status, a.body)
	return a.text()
}

func completion(name string) obj {
	return obj{"model": "tiny", "prompt": prompt(240, name), "max_tokens": 24, "temperature": 0}
}

func TestDecodeWithHandoffGivesTheTextOfOneEngine(t *testing.T) {
	for _, path := range []string{completions, chat} {
		t.Run(path, func(t *testing.T) {
			s := newScene(t)
			body := completion("one")
			if path == chat {
				body = obj{"model": "tiny", "messages": []obj{{"role": "user", "content": prompt(240, "one")}}, "max_tokens": 24, "temperature": 0}
			}
			want := s.alone(path, body)
			got := s.decode(path, body, s.prefill(path, body))
			assert.Equal(t, 200, got.status, got.body)
			assert.Equal(t, want, got.text())
			assert.Len(t, want, 24)

			d, n := s.d.Stats(), got.get("usage.prompt_tokens").Int()
			assert.Equal(t, n, d.ExternalKVTransfer, "tokens read from P")
			assert.Zero(t, d.LocalCompute, "tokens computed on D")
			assert.Equal(t, (n+block-1)/block*block*16, d.BytesTransferred)
			assert.Zero(t, s.p.Stats().PinnedBlocks, "blocks pinned after the read")
			assert.NoError(t, s.p.CheckKV())
			assert.NoError(t, s.d.CheckKV())
		})
	}
}
