// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"net/http"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/cut"
)

// cutShort ends a response whose end did not come, so that no client takes it for whole.
func cutShort(w http.ResponseWriter, r *http.Request, b *Body, e *Error) {
	_ = http.NewResponseController(w).Flush() // what was read goes out before Close waits for the legs' end
	_ = b.Close()
	api := b.a.x.req.API
	cut.Response(w, r, cut.Words(errorObject(api, e), b.sse, api == connector.APIMessages))
}
