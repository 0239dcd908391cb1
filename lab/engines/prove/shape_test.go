// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
)

func withBody(body string) *recordedResponse {
	return &recordedResponse{Status: 200, Headers: map[string]string{"content-type": "application/json"},
		Body: json.RawMessage(body)}
}

func TestChangesOfAShape(t *testing.T) {
	const recorded = `{"id":"cmpl-1","created":1,"object":"text_completion","usage":null,` +
		`"choices":[{"index":0,"text":"a"}],"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_port":5600}}`
	for name, test := range map[string]struct {
		now  string
		want []string
	}{
		"ids, times, ports and counts are values": {`{"id":"cmpl-2","created":9,"object":"text_completion","usage":null,
			"choices":[{"index":7,"text":""}],"kv_transfer_params":{"remote_block_ids":[[8]],"remote_port":1}}`, nil},
		"added": {`{"id":"cmpl-1","created":1,"object":"text_completion","usage":null,"new":{"x":true},
			"choices":[{"index":0,"text":"a"}],"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_port":5600}}`,
			[]string{"added  body.new: object", "added  body.new.x: boolean"}},
		"gone": {`{"id":"cmpl-1","created":1,"object":"text_completion","usage":null,
			"choices":[{"index":0}],"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_port":5600}}`,
			[]string{"gone   body.choices[].text: string"}},
		"null, nested less, and a number as a string": {`{"id":null,"created":1,"object":"text_completion","usage":null,
			"choices":[{"index":0,"text":"a"}],"kv_transfer_params":{"remote_block_ids":[1,2],"remote_port":"5600"}}`,
			[]string{"type   body.id: null, was string",
				"type   body.kv_transfer_params.remote_block_ids[]: number, was array",
				"gone   body.kv_transfer_params.remote_block_ids[][]: number",
				"type   body.kv_transfer_params.remote_port: string, was number"}},
		"an element unlike the others": {`{"id":"cmpl-1","created":1,"object":"text_completion","usage":null,
			"choices":[{"index":0,"text":"a"},{"index":1,"text":null}],
			"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_port":5600}}`,
			[]string{"type   body.choices[].text: null or string, was string"}},
		"another word": {`{"id":"cmpl-1","created":1,"object":"completion","usage":null,
			"choices":[{"index":0,"text":"a"}],"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_port":5600}}`,
			[]string{`type   body.object: "completion", was "text_completion"`}},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, test.want, changes(shapeOf(withBody(recorded)), shapeOf(withBody(test.now))))
		})
	}
}

func TestStatusAndHeadersBelongToTheShape(t *testing.T) {
	before, now := withBody(`{}`), withBody(`{}`)
	now.Status = 202
	now.Headers = map[string]string{"Content-Type": "text/plain", "X-Request-Id": "1", "Date": "today"}
	assert.Equal(t, []string{"type   header content-type: text/plain, was application/json",
		"added  header x-request-id: string", "type   status: 202, was 200"}, changes(shapeOf(before), shapeOf(now)))
	now.Status = 400
	assert.Equal(t, []string{"type   status: 400, was 200"}, changes(shapeOf(before), shapeOf(now)))
	assert.Equal(t, []string{"type   status: none, was 200"}, changes(shapeOf(before), shapeOf(nil)))
	assert.Equal(t, []string{"type   status: 200, was none"}, changes(shapeOf(nil), shapeOf(before)))
	assert.Empty(t, changes(shapeOf(nil), shapeOf(nil)))
}

// A member that moves from one event of a stream to another is a change; the number of events is none.
func TestStreamsAreComparedByFirstLastAndMiddleEvents(t *testing.T) {
	stream := func(lines ...string) shape {
		return shapeOf(&recordedResponse{Status: 200, SSELines: lines})
	}
	recorded := stream(`data: {"a":1}`, `data: {"b":1}`, `data: {"b":2}`, `data: {"c":1}`, `data: [DONE]`)
	assert.Empty(t, changes(recorded, stream(
		`data: {"a":1}`, "", `data: {"b":1}`, `data: {"c":9}`, "", `data: [DONE]`)))
	assert.Equal(t, []string{"added  last event.kv_transfer_params: null"}, changes(recorded, stream(
		`data: {"a":1}`, `data: {"b":1}`, `data: {"c":1,"kv_transfer_params":null}`, `data: [DONE]`)))
	assert.Equal(t, []string{"gone   stream ends with: [DONE]", "added  stream event: stop"}, changes(recorded, stream(
		`data: {"a":1}`, `data: {"b":1}`, `event: stop`, `data: {"c":1}`)))
}
