// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"encoding/json"
	"net/http"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/cut"
)

// cutShort ends a response whose end did not come, so that no client takes it for whole. If its head went out early,
// the client gets the error.
func cutShort(w http.ResponseWriter, r *http.Request, b *Body, limit time.Duration, e *Error, early bool) {
	rc := http.NewResponseController(w)
	if limit > 0 { // the last write's deadline may have passed while D was silent
		_ = rc.SetWriteDeadline(time.Now().Add(limit))
	}
	_ = rc.Flush() // what was read goes out before Close waits for the legs' end
	_ = b.Close()
	api := b.a.s.API
	words := lastWords(api, errorObject(api, e), b.sse || early, false)
	if early && e.Code != CodeClientGone {
		lastEvent(w, r, limit, words)
		return
	}
	cut.Response(w, r, words)
}

// failEarly ends a request that has failed after the head of its response went out.
func (h *handler) failEarly(w http.ResponseWriter, r *http.Request, e *Error) {
	api := connector.APIOf(r.URL.Path)
	m := &memory{header: http.Header{}, status: http.StatusOK}
	h.onError(m, r, e)
	var object bytes.Buffer // on one line
	if json.Compact(&object, m.body.Bytes()) != nil {
		object.Reset()
		object.Write(errorObject(api, e))
	}
	words := bytes.TrimLeft(lastWords(api, object.Bytes(), true, true), "\n") // no event is begun
	if e.Code == CodeClientGone {
		cut.Response(w, r, words)
	} else {
		lastEvent(w, r, h.writeTimeout, words)
	}
	cut.Abort(r)
}

// lastEvent has the client get the last words before the response is cut.
func lastEvent(w http.ResponseWriter, r *http.Request, limit time.Duration, words []byte) {
	if limit > 0 {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(limit))
	}
	_, _ = w.Write(words)
	cut.Response(w, r, []byte("\n"))
}

// lastWords are the last of a response that breaks. first is true of a stream that had no other event.
func lastWords(api connector.API, object []byte, stream, first bool) []byte {
	named := api == connector.APIMessages
	if stream && api == connector.APIResponses {
		object, named = responsesEvent(object, first), true
	}
	return cut.Words(object, stream, named)
}

// responsesEvent is an error object as the Responses API's event. Its members stand in it twice: OpenAI's clients raise
// an exception for the member error (openai-python 3.54, openai-node 6.30, openai-go 3.96), and their type of the event
// has the others.
func responsesEvent(object []byte, first bool) []byte {
	said := gjson.GetBytes(object, "error")
	if !said.IsObject() {
		return object // a host's own
	}
	event := map[string]any{"type": "error", "error": json.RawMessage(said.Raw), "code": nil, "param": nil,
		"message": said.Get("message").String()}
	for _, name := range []string{"code", "param"} {
		if v := said.Get(name); v.Type != gjson.Null {
			event[name] = v.String() // vLLM's code is a number
		}
	}
	if first {
		event["sequence_number"] = 0
	}
	b, _ := json.Marshal(event)
	return b
}
