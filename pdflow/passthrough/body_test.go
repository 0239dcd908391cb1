// SPDX-License-Identifier: Apache-2.0

package passthrough_test

import (
	"bytes"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
)

const formType = "multipart/form-data; boundary=b"

// form is a body of an audio file and fields, each name=value.
func form(fields ...string) string {
	const begin = "--b\r\nContent-Disposition: form-data; name=\""
	text := begin + "file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\nRIFF\x00\xff\r\n"
	for _, field := range fields {
		name, value, _ := strings.Cut(field, "=")
		text += begin + name + "\"\r\n\r\n" + value + "\r\n"
	}
	return text + "--b--\r\n"
}

// OpenAI's clients send audio as a form. It reaches an engine of its model byte for byte.
func TestAFormPassesAsItCame(t *testing.T) {
	e := newEngine(t, answers(http.StatusOK, `{"text":"hi"}`))
	var asked []string
	h := handler(t, func(model string) (*passthrough.Engines, *pdflow.Error) {
		asked = append(asked, model)
		return e.Engines, nil
	}, &passthrough.Options{Paths: []string{"/v1/images/*"}})
	e.Members = []string{"kv_ticket"}
	sent := form("model=whisper", "timestamp_granularities[]=word", "timestamp_granularities[]=segment", "stream=true",
		"temperature=0.2", `prompt={"kv_`, `vllm_xargs={"a":1}`, "language=")
	for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"} {
		w := do(h, post(path, sent, "Content-Type", formType))
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		last := len(e.requests) - 1
		assert.Equal(t, sent, e.bodies[last])
		assert.EqualValues(t, len(sent), e.requests[last].ContentLength)
		assert.Equal(t, formType, e.requests[last].Header.Get("Content-Type"))
		assert.Equal(t, "whisper", e.picks[last].Request.Model)
	}
	assert.Equal(t, []string{"whisper", "whisper", "whisper"}, asked)
}

func TestFormsThatAreRefused(t *testing.T) {
	e := newEngine(t, answers(http.StatusOK, "{}"))
	e.Members = []string{"kv_ticket", "extra.ticket"}
	h := handler(t, e.find, &passthrough.Options{MaxBody: 3 << 20})
	for name, c := range map[string]struct {
		path, contentType, body string
		status                  int
		param                   string
	}{
		"a transfer member":          {body: form("model=m", "kv_transfer_params={}"), param: "kv_transfer_params"},
		"an id":                      {body: form("request_id=x"), param: "request_id"},
		"a member of the connector":  {body: form("kv_ticket=1"), param: "kv_ticket"},
		"a nested one":               {body: form(`extra={"ticket":1}`), param: "extra"},
		"one inside vllm_xargs":      {body: form(`vllm_xargs= {"kv_transfer_params":{}}`), param: "vllm_xargs"},
		"one in brackets":            {body: form("vllm_xargs[kv_transfer_params]=1"), param: "vllm_xargs"},
		"one in brackets, deeper":    {body: form("vllm_xargs[extra_args][kv_ticket]=1"), param: "vllm_xargs"},
		"one with a dot":             {body: form("extra.ticket=1"), param: "extra"},
		"one of a list":              {body: form("bootstrap_room[]=1"), param: "bootstrap_room"},
		"as a file":                  {body: strings.Replace(form(), `"file"`, `"kv_ticket"`, 1), param: "kv_ticket"},
		"the model twice":            {body: form("model=m", "model=n"), param: "model"},
		"a model that is no text":    {body: form("model=\xff"), status: 200}, // U+FFFD, which nobody serves
		"a member twice in a value":  {body: form(`vllm_xargs={"a":1,"a":2}`), param: "vllm_xargs"},
		"no name":                    {body: form("=1")},
		"a name that is read in two": {body: form(`kv\_ticket=1`)},
		"a name that is too long":    {body: form(strings.Repeat("n", 200) + "=1")},
		"a value that is too long":   {body: form("prompt=" + strings.Repeat("x", 1<<20+1))},
		"too many fields":            {body: form(strings.Split(strings.Repeat("x=1 ", 70), " ")[:70]...)},
		"without its end":            {body: strings.TrimSuffix(form("model=m"), "--b--\r\n")},
		"another boundary":           {body: form("model=m"), contentType: "multipart/form-data; boundary=c"},
		"no boundary":                {body: form("model=m"), contentType: "multipart/form-data", status: 415},
		"another form":               {body: "model=m", contentType: "application/x-www-form-urlencoded", status: 415},
		"another path":               {path: "/v1/embeddings", body: form("model=m"), status: 415},
		"too large":                  {body: form("model=m") + strings.Repeat(" ", 3<<20), status: 413},
	} {
		path, contentType, status := "/v1/audio/transcriptions", formType, http.StatusBadRequest
		if c.path != "" {
			path = c.path
		}
		if c.contentType != "" {
			contentType = c.contentType
		}
		if c.status != 0 {
			status = c.status
		}
		w := do(h, post(path, c.body, "Content-Type", contentType))
		assert.Equal(t, status, w.Code, "%s: %s", name, w.Body)
		if name == "no boundary" { // as of a client that sets the type by hand
			assert.Contains(t, w.Body.String(), "Content-Type must have the form's boundary")
		}
		if c.param != "" {
			assert.Contains(t, w.Body.String(), `"param":"`+c.param, name)
		}
	}
	w := do(h, post("/v1/audio/transcriptions", form("model=m"), "Content-Type", formType, "Content-Encoding", "gzip"))
	assert.Equal(t, http.StatusUnsupportedMediaType, w.Code)
	assert.Len(t, e.requests, 1)
}

// What an engine could read as a transfer member passes in no form, and what passes is what the client sent.
func FuzzForm(f *testing.F) {
	f.Add([]byte(form("model=m", "vllm_xargs[kv_transfer_params]=1")))
	f.Add([]byte(form(`vllm_xargs={"kv_transfer_params":{}}`, "timestamp_granularities[]=word")))
	f.Fuzz(func(t *testing.T, raw []byte) {
		e := newEngine(t, answers(http.StatusOK, "{}"))
		do(handler(t, e.find, nil), post("/v1/audio/x", string(raw), "Content-Type", formType))
		if len(e.requests) == 0 {
			return
		}
		require.Equal(t, string(raw), e.bodies[0])
		if read, err := multipart.NewReader(bytes.NewReader(raw), "b").ReadForm(1 << 20); err == nil {
			for name := range read.Value {
				require.NotContains(t, name, "kv_transfer_params")
			}
			_ = read.RemoveAll()
		}
	})
}

// wanting is a GET that asks for another protocol.
func wanting(path, protocol string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	r.Header.Set("Upgrade", protocol)
	return r
}

// A client that wants a WebSocket is told that there is none, and no engine is asked.
func TestWebSocketsAreRefused(t *testing.T) {
	e := newEngine(t, answers(http.StatusOK, "{}"))
	h := handler(t, e.find, nil)
	for _, path := range []string{"/v1/realtime", "/v1/realtime/sessions", "/v1/responses"} {
		w := do(h, wanting(path, "WebSocket"))
		assert.Equal(t, http.StatusBadRequest, w.Code, path)
		assert.Contains(t, w.Body.String(), "WebSocket connections (/v1/realtime) are not served here", path)
	}
	w := do(h, wanting("/v1/realtime", ""))
	assert.Equal(t, http.StatusBadRequest, w.Code)
	assert.Equal(t, http.StatusNotFound, do(h, wanting("/v1/realtimes", "")).Code)
	assert.Empty(t, e.requests)
}
