// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
)

// past is a write deadline that has expired. Over HTTP/1, net/http can then write nothing more, not even the last
// chunk of the response, and closes the connection. Over HTTP/2 it resets the stream at once.
var past = time.Unix(1, 0)

// cut ends a response whose end did not come, in such a way that no client takes it for whole. It does not rely on
// http.ErrAbortHandler, because middleware may recover from that panic: net/http would then end the response normally.
//
// Over HTTP/1.0 only the connection's end ends a response without a length, and some writers hide the connection:
// there the last bytes say that the response has failed. Where the connection is cut, the same bytes reach nobody;
// writing them makes net/http's writer fail for good, even if middleware sets another deadline afterwards. A response
// that is shorter than its Content-Length needs no such bytes.
func cut(w http.ResponseWriter, r *http.Request, b *Body) {
	rc := http.NewResponseController(w)
	_ = rc.Flush() // what was read goes out first
	_ = b.Close()
	if r.ProtoAtLeast(1, 1) {
		_ = rc.SetWriteDeadline(past)
	}
	if len(w.Header()["Content-Length"]) == 0 {
		_, _ = w.Write(lastWords(b.a.x.req.API, b.sse, b.err))
		_ = rc.Flush()
	}
}

// lastWords are the bytes that turn a response of which a part was sent into a failed one. In a stream they are an
// error event. openai-python 3.54, openai-node 6.49 and anthropic-python 2.12 raise an error for it, and take a stream
// for whole that ends without [DONE]. Any other body becomes invalid JSON.
func lastWords(api connector.API, sse bool, e *Error) []byte {
	object := errorObject(api, e)
	if !sse {
		return append([]byte("\n"), object...)
	}
	event := "\n\ndata: " // the empty line ends an event that was cut
	if api == connector.APIMessages {
		event = "\n\nevent: error\ndata: "
	}
	return append(append([]byte(event), object...), "\n\n"...)
}

// abort ends the handler's call. Outside a server, as with a test's recorder, there is no connection to abort.
func abort(r *http.Request) {
	if r.Context().Value(http.ServerContextKey) != nil {
		panic(http.ErrAbortHandler)
	}
}
