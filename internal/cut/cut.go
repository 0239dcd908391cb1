// SPDX-License-Identifier: Apache-2.0

// Package cut ends responses whose end did not come, in such a way that no client takes them for whole. It does not
// rely on http.ErrAbortHandler, because middleware may recover from that panic: net/http would then end the response
// normally.
package cut

import (
	"net/http"
	"time"
)

// Past is a write deadline that has expired. Over HTTP/1, net/http can then write nothing more, not even the last
// chunk of the response, and closes the connection. Over HTTP/2 it resets the stream at once.
var Past = time.Unix(1, 0)

// Response cuts a response of which a part was sent. What was written before goes out first. lastWords are what [Words]
// returns.
//
// Over HTTP/1.0 only the connection's end ends a response without a length, and some writers hide the connection:
// there the last words say that the response has failed. Where the connection is cut, the same bytes reach nobody;
// writing them makes net/http's writer fail for good, even if middleware sets another deadline afterwards. A response
// that is shorter than its Content-Length needs no such bytes.
func Response(w http.ResponseWriter, r *http.Request, lastWords []byte) {
	rc := http.NewResponseController(w)
	_ = rc.Flush()
	if r.ProtoAtLeast(1, 1) {
		_ = rc.SetWriteDeadline(Past)
	}
	if len(w.Header()["Content-Length"]) == 0 {
		_, _ = w.Write(lastWords)
		_ = rc.Flush()
	}
}

// Words are the bytes that turn a response of which a part was sent into a failed one. object is an error object. In a
// stream they are an error event, named if clients of the API want events with names. openai-python 3.54,
// openai-node 6.49 and anthropic-python 2.12 raise an error for it, and take a stream for whole that ends without
// [DONE]. Any other body becomes invalid JSON.
func Words(object []byte, stream, named bool) []byte {
	if !stream {
		return append([]byte("\n"), object...)
	}
	event := "\n\ndata: " // the empty line ends an event that was cut
	if named {
		event = "\n\nevent: error\ndata: "
	}
	return append(append([]byte(event), object...), "\n\n"...)
}

// Abort ends the handler's call. Outside a server, as with a test's recorder, there is no connection to abort.
func Abort(r *http.Request) {
	if r.Context().Value(http.ServerContextKey) != nil {
		panic(http.ErrAbortHandler)
	}
}
