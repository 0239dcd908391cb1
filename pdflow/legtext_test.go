// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// The memory of legs' heads and bodies serves other legs. No engine may ever read another request's key or prompt,
// whatever engines, connections and clients do meanwhile.
func TestALegHasNoOtherRequestsBody(t *testing.T) {
	var read, foreign, early, cancelled atomic.Int32
	engine := func(w http.ResponseWriter, r *http.Request) {
		n := rand.IntN(8)
		if n == 0 { // answers before it has read the body, and reads on
			early.Add(1)
			rc := http.NewResponseController(w)
			_ = rc.EnableFullDuplex()
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"choices":[`)
			_ = rc.Flush()
		}
		body, err := io.ReadAll(r.Body)
		if err == nil {
			read.Add(1)
			prompt := gjson.GetBytes(body, "prompt").String()
			if len(prompt) < 8 || strings.Repeat(prompt[:8], len(prompt)/8) != prompt ||
				r.Header.Get("Authorization") != "Bearer "+strings.TrimSpace(prompt[:8]) {
				foreign.Add(1)
			}
		}
		switch n {
		case 0:
			_, _ = io.WriteString(w, `]}`)
			return
		case 1:
			panic(http.ErrAbortHandler)
		case 2:
			time.Sleep(time.Millisecond)
		}
		answer(ok)(nil, w, r, "")
	}
	url := func() string { return serve(t, http.HandlerFunc(engine)) }
	flow, _ := newFlow(t, &fake{}, []discovery.Endpoint{endpoint(t, url(), discovery.RolePrefill),
		endpoint(t, url(), discovery.RoleDecode)},
		pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: time.Microsecond}))
	var clients sync.WaitGroup
	for c := range 8 {
		clients.Go(func() {
			for i := range 150 {
				ctx, leave := context.WithCancel(t.Context())
				if i%5 == 0 {
					cancelled.Add(1)
					time.AfterFunc(time.Duration(rand.IntN(3000))*time.Microsecond, leave)
				}
				own := fmt.Sprintf("%02d.%04d", c, i)
				prompt := strings.Repeat(own+" ", []int{10, 300, 20_000}[i%3])
				resp, err := flow.Do(ctx, &pdflow.Request{API: connector.APICompletions,
					Header: http.Header{"Authorization": {"Bearer " + own}},
					Body:   []byte(`{"model":"m","prompt":"` + prompt + `","max_tokens":5}`)})
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
				leave()
			}
		})
	}
	clients.Wait()
	assert.Zero(t, foreign.Load())
	t.Logf("%d bodies read, %d answered early, %d clients left", read.Load(), early.Load(), cancelled.Load())
	assert.Greater(t, read.Load(), int32(500))
	assert.Greater(t, early.Load(), int32(50))
}
