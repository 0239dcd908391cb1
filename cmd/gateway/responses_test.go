// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

const responsesPath = "/v1/responses"

// keepers are two pairs whose decode engines keep their responses, and a gateway over them.
type keepers struct {
	*program
	d    []*enginesim.Engine
	yaml string
}

// startKeepers starts them; itl is the time between two tokens.
func startKeepers(t *testing.T, itl time.Duration) *keepers {
	t.Helper()
	k := &keepers{}
	var entries []string
	for range 2 {
		port, err := freeport.One() // of engines that end, and whose addresses are asked afterwards
		require.NoError(t, err)
		p, d, err := enginesim.Pair(enginesim.Config{Model: "m"},
			enginesim.Config{KeepResponses: true, Listen: "127.0.0.1:" + port, ITL: itl})
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
		k.d = append(k.d, d)
		entries = append(entries, entry(p.URL(), "prefill", nil), entry(d.URL(), "decode", nil))
	}
	k.yaml = gatewayYAML("") + serverYAML("m", "  kvConnector: {type: nixl}\n", entries...)
	k.program = start(t, k.yaml)
	return k
}

// respond asks for a response and returns its id. more are further members.
func (p *program) respond(more string) (id, mode string) {
	p.t.Helper()
	return p.respondAs("m", more)
}

// respondAs does so for a model by that name; "": the request names none.
func (p *program) respondAs(model, more string) (id, mode string) {
	p.t.Helper()
	if model != "" {
		more += `,"model":"` + model + `"`
	}
	status, h, body := do(p.t, http.MethodPost, p.client+responsesPath,
		`{"input":"hello","max_output_tokens":4`+more+`}`)
	require.Equal(p.t, http.StatusOK, status, body)
	if strings.Contains(more, `"stream":true`) {
		_, body, _ = strings.Cut(body, "data: ")
		body = gjson.Get(body, "response").Raw
	}
	id = gjson.Get(body, "id").String()
	require.NotEmpty(p.t, id, body)
	return id, h.Get("X-PD-Mode")
}

func (p *program) get(path string) (status int, body string) {
	p.t.Helper()
	status, _, body = do(p.t, http.MethodGet, p.client+responsesPath+"/"+path, "")
	return status, body
}

// made are the responses of one of each kind: whole, streamed, in the background.
func (k *keepers) made(n int) (ids []string) {
	for i := range n {
		id, mode := k.respond([]string{"", `,"stream":true`, `,"background":true`}[i%3])
		assert.Equal(k.t, []string{"disaggregated", "disaggregated", "aggregated"}[i%3], mode)
		ids = append(ids, id)
	}
	return ids
}

func (k *keepers) followed(p *program, ids []string) {
	k.t.Helper()
	for _, id := range ids {
		for range 2 { // round robin would miss the engine
			_, mode := p.respond(`,"previous_response_id":"` + id + `"`)
			assert.Equal(k.t, "aggregated", mode, "P cannot see what the request refers to")
		}
		status, body := p.get(id)
		assert.Equal(k.t, http.StatusOK, status, body)
		assert.Equal(k.t, id, gjson.Get(body, "id").String())
	}
}

// asked counts what the decode engines were asked for responses by GET.
func (k *keepers) asked() (n int) {
	for _, d := range k.d {
		for _, r := range d.Requests() {
			if r.Method == http.MethodGet {
				n++
			}
		}
	}
	return n
}

func isNoResponse(t *testing.T, status int, body string) {
	t.Helper()
	assert.Equal(t, http.StatusNotFound, status, body)
	assert.Equal(t, "response_not_found", gjson.Get(body, "error.code").String(), body)
	assert.Equal(t, "invalid_request_error", gjson.Get(body, "error.type").String(), body)
}

// What refers to a response goes to the engine that made it, also by another gateway, and after a restart.
func TestWhatRefersToAResponseGoesToItsEngine(t *testing.T) {
	k := startKeepers(t, 0)
	ids := k.made(12)
	k.followed(k.program, ids)
	assert.Equal(t, len(ids), k.asked(), "only the clients ask: who made what is known")
	for _, d := range k.d {
		assert.NotEmpty(t, d.Requests(), "both make some")
	}
	second := start(t, k.yaml)
	k.followed(second, ids)
	assert.LessOrEqual(t, k.asked(), 4*len(ids), "the second asks each engine once for each")
}

// A model may have several names: a response keeps the one by which it was made, as long as the gateway remembers it.
func TestAStoredResponseHasTheNameItWasMadeBy(t *testing.T) {
	k := startKeepers(t, 0)
	p, yaml := k.named(map[string]string{"first": "m", "second": "m"})
	for _, name := range []string{"first", "second", "m"} {
		for _, more := range []string{"", `,"stream":true`, `,"background":true`} {
			id, _ := p.respondAs(name, more)
			status, body := p.get(id)
			require.Equal(t, http.StatusOK, status, body)
			assert.Equal(t, name, gjson.Get(body, "model").String(), more)
			if more == "" {
				_, body = start(t, yaml).get(id)
				assert.Equal(t, "m", gjson.Get(body, "model").String(), "after a restart")
			}
		}
	}
	id, _ := p.respondAs("", "")
	_, body := p.get(id)
	assert.Equal(t, "m", gjson.Get(body, "model").String())
}

// named starts a gateway in which clients have names for the keepers' model.
func (k *keepers) named(names map[string]string) (p *program, yaml string) {
	given, err := json.Marshal(names)
	require.NoError(k.t, err)
	yaml = strings.Replace(k.yaml, "  kvConnector:", "  modelNames: "+string(given)+"\n  kvConnector:", 1)
	return start(k.t, yaml), yaml
}

func TestAResponseIsLostWithItsEngine(t *testing.T) {
	k := startKeepers(t, 0)
	ids := k.made(12)
	at := map[string]int{}
	for _, id := range ids {
		for i, d := range k.d {
			if status, _, _ := do(t, http.MethodGet, d.URL()+responsesPath+"/"+id, ""); status == http.StatusOK {
				at[id] = i
			}
		}
	}
	second := start(t, k.yaml)
	gone := func(p *program, id string) {
		t.Helper()
		status, body := p.get(id)
		isNoResponse(t, status, body)
		status, _, body = do(t, http.MethodPost, p.client+responsesPath,
			`{"model":"m","input":"more","previous_response_id":"`+id+`"}`)
		isNoResponse(t, status, body)
	}
	k.d[0].Kill()
	for _, id := range ids {
		if at[id] == 1 {
			k.followed(k.program, []string{id})
			k.followed(second, []string{id})
			continue
		}
		gone(k.program, id)
		gone(second, id)
	}
	require.NoError(t, k.d[1].Restart()) // it serves, and has forgotten
	for _, id := range ids {
		gone(k.program, id)
	}
	require.NoError(t, k.d[0].Restart())
	eventually(t, func() bool { id, _ := k.respond(""); status, _ := k.get(id); return status == http.StatusOK })
}

// An engine that does not answer may have the response. That it is lost would be a lie.
func TestAnEngineThatIsNotReadyKeepsItsResponses(t *testing.T) {
	k := startKeepers(t, 0)
	ids := k.made(6)
	for _, d := range k.d {
		d.Freeze()
	}
	k.becomes(http.StatusServiceUnavailable)
	for _, p := range []*program{k.program, start(t, k.yaml)} {
		status, h, body := do(t, http.MethodGet, p.client+responsesPath+"/"+ids[0], "")
		assert.Equal(t, http.StatusServiceUnavailable, status, body)
		assert.NotEmpty(t, h.Get("Retry-After"))
		status, h, body = do(t, http.MethodPost, p.client+responsesPath,
			`{"model":"m","input":"more","previous_response_id":"`+ids[0]+`"}`)
		assert.Equal(t, http.StatusServiceUnavailable, status, body)
		assert.NotEmpty(t, h.Get("Retry-After"))
	}
	for _, d := range k.d {
		d.Thaw()
	}
	k.becomes(http.StatusOK)
	k.followed(k.program, ids)
}

// Who asks for one wrong id after another must not have all engines asked for each.
func TestAFloodOfUnknownResponsesIsBounded(t *testing.T) {
	k := startKeepers(t, 0)
	known := k.made(3)
	began := time.Now()
	var clients sync.WaitGroup
	for c := range 8 {
		clients.Go(func() {
			for i := range 150 {
				id := fmt.Sprintf("resp_%d_%d", c, i)
				status, body := k.get(id)
				if status != http.StatusServiceUnavailable {
					isNoResponse(t, status, body)
				}
			}
		})
	}
	clients.Wait()
	seconds := int(time.Since(began)/time.Second) + 2
	assert.LessOrEqual(t, k.asked(), 258*seconds)
	k.followed(k.program, known)

	time.Sleep(time.Second)
	before := k.asked()
	for range 50 {
		clients.Go(func() {
			status, body := k.get("resp_the_same")
			isNoResponse(t, status, body)
		})
	}
	clients.Wait()
	assert.LessOrEqual(t, k.asked()-before, 4, "one search for all, which is remembered for a second")
}

func TestResponsesInTheBackgroundAreReadAndCancelled(t *testing.T) {
	k := startKeepers(t, 100*time.Millisecond)
	for _, p := range []*program{k.program, start(t, k.yaml)} {
		long, _ := k.respond(`,"background":true`)
		status, _, body := do(t, http.MethodPost, p.client+responsesPath+"/"+long+"/cancel", "")
		assert.Equal(t, http.StatusOK, status, body)
		assert.Equal(t, "cancelled", gjson.Get(body, "status").String())
		status, _, body = do(t, http.MethodPost, p.client+responsesPath+"/"+long+"/cancel", "")
		assert.Equal(t, http.StatusBadRequest, status, "the engine's own word")
		assert.Contains(t, body, "Cannot cancel a synchronous response.")

		streamed, _ := k.respond(`,"background":true,"stream":true`)
		status, body = p.get(streamed + "?stream=true&starting_after=1")
		assert.Equal(t, http.StatusOK, status, body)
		assert.True(t, strings.HasPrefix(body, "event: response.output_item.added\n"), body)
		assert.Contains(t, body, "event: response.completed\n")
	}
	id, _ := k.respond("")
	status, body := k.get(id + "/input_items")
	assert.Equal(t, http.StatusNotFound, status)
	assert.Contains(t, body, `"Not Found"`, "vLLM has the response, and not this path")
	status, _, _ = do(t, http.MethodDelete, k.client+responsesPath+"/"+id, "")
	assert.Equal(t, http.StatusMethodNotAllowed, status, "vLLM deletes none")
	k.followed(k.program, []string{id})
	status, _, _ = do(t, http.MethodPost, k.client+responsesPath+"/render", `{"input":"x"}`)
	assert.Equal(t, http.StatusNotFound, status, "other paths need passthrough")
}

func TestResponsesThatNobodyStores(t *testing.T) {
	k := startKeepers(t, 0)
	for _, id := range []string{"resp_x", "..%2fx", strings.Repeat("x", 300)} {
		status, body := k.get(id)
		assert.Equal(t, http.StatusNotFound, status, id, body)
	}
	id, mode := k.respond(`,"store":false`)
	assert.Equal(t, "disaggregated", mode)
	status, body := k.get(id)
	isNoResponse(t, status, body)
	for _, member := range []string{`"x":1`, `"previous_response_id":null`} {
		_, mode = k.respond("," + member)
		assert.Equal(t, "disaggregated", mode, member)
	}
}
