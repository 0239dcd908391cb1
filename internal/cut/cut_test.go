// SPDX-License-Identifier: Apache-2.0

package cut_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/internal/cut"
)

// deadlined notes what is asked of a connection.
type deadlined struct {
	*httptest.ResponseRecorder
	deadline time.Time
}

func (d *deadlined) SetWriteDeadline(t time.Time) error {
	d.deadline = t
	return nil
}

// Whole servers, with middleware around them, are in pdflow's tests.
func TestHowAResponseIsCut(t *testing.T) {
	for name, c := range map[string]struct {
		proto   string
		length  string
		written string
		cut     bool
	}{
		"over HTTP/1.1":                {"HTTP/1.1", "", "words", true},
		"over HTTP/2":                  {"HTTP/2.0", "", "words", true},
		"with a length":                {"HTTP/1.1", "9", "", true},
		"over HTTP/1.0":                {"HTTP/1.0", "", "words", false},
		"over HTTP/1.0, with a length": {"HTTP/1.0", "9", "", false},
	} {
		w := &deadlined{ResponseRecorder: httptest.NewRecorder()}
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Proto = c.proto
		r.ProtoMajor, r.ProtoMinor, _ = http.ParseHTTPVersion(c.proto)
		if c.length != "" {
			w.Header().Set("Content-Length", c.length)
		}
		cut.Response(w, r, []byte("words"))
		assert.Equal(t, c.written, w.Body.String(), name)
		assert.Equal(t, c.cut, w.deadline.Equal(cut.Past), name)
		assert.True(t, w.Flushed, name)
		assert.NotPanics(t, func() { cut.Abort(r) }, "there is no server")
	}
}

func TestLastWords(t *testing.T) {
	assert.Equal(t, "\n{}", string(cut.Words([]byte(`{}`), false, true)), "no JSON, whatever went before")
	assert.Equal(t, "\n\ndata: {}\n\n", string(cut.Words([]byte(`{}`), true, false)))
	assert.Equal(t, "\n\nevent: error\ndata: {}\n\n", string(cut.Words([]byte(`{}`), true, true)))
}
