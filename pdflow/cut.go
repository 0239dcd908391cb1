// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/cut"
)

// cutShort ends a response whose end did not come, so that no client takes it for whole.
func cutShort(w http.ResponseWriter, r *http.Request, b *Body, limit time.Duration, e *Error) {
	rc := http.NewResponseController(w)
	if limit > 0 { // the last write's deadline may have passed while D was silent
		_ = rc.SetWriteDeadline(time.Now().Add(limit))
	}
	_ = rc.Flush() // what was read goes out before Close waits for the legs' end
	_ = b.Close()
	api := b.a.s.API
	cut.Response(w, r, cut.Words(errorObject(api, e), b.sse, api == connector.APIMessages))
}
