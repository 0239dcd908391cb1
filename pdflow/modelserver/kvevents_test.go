// SPDX-License-Identifier: Apache-2.0

package modelserver_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/pdflow/modelserver"
)

func TestKVEventsAreRead(t *testing.T) {
	for events, want := range map[string]string{
		`{}`:                 "",
		`{"mode":"off"}`:     "",
		`{"mode":false}`:     "",
		`{"mode":"entries"}`: "",
		`{"mode":"ask","listen":"10.0.0.1:5557","ranks":2,"tokens":"engines","tokensTimeout":"1s"}`: "",
		`{"mode":"maybe"}`:                            "spec.kvEvents.mode: is not a known mode; write off, entries",
		`{"listen":"5557"}`:                           "spec.kvEvents.listen: is not an address",
		`{"mode":"ask","listen":"a:65535","ranks":2}`: "spec.kvEvents.listen: is not an address with a port",
		`{"mode":"ask","ranks":-1}`:                   "spec.kvEvents.ranks: is not a number of ranks",
		`{"mode":"ask","tokens":"me"}`:                "spec.kvEvents.tokens: is not known; write off or engines",
		`{"mode":"ask","tokensTimeout":"0s"}`:         "spec.kvEvents.tokensTimeout: is not a time above 0",
	} {
		_, err := modelserver.Read(fmt.Appendf(nil, `{"apiVersion":"networking.matrixinfer.ai/v1alpha1",`+
			`"kind":"ModelServer","spec":{"model":"m","kvConnector":{"type":"http"},"kvEvents":%s,"discovery":`+
			`{"dns":{"prefill":"p","decode":"d"}}}}`, events))
		if want == "" {
			assert.NoError(t, err, events)
		} else {
			assert.ErrorContains(t, err, want, events)
		}
	}
}

func TestAnEntryWhoseAddressOfEventsIsWrongIsAFault(t *testing.T) {
	read := func(address, mode string) (*modelserver.ModelServer, error) {
		return modelserver.Read(fmt.Appendf(nil, `{"apiVersion":"networking.matrixinfer.ai/v1alpha1",`+
			`"kind":"ModelServer","spec":{"model":"m","kvConnector":{"type":"http"},"kvEvents":{"mode":%q},`+
			`"discovery":{"static":{"endpoints":[{"url":"http://a:1","role":"both","attributes":{"kvEvents":%q}}]}}}}`,
			mode, address))
	}
	_, err := read("5557", "ask")
	assert.ErrorContains(t, err, "kvEvents, kvEventsReplay and loadEvents must be tcp://HOST:PORT; write tcp://*:5557")
	m, err := read("", "entries")
	assert.NoError(t, err)
	if assert.Len(t, m.Notes, 1) {
		assert.Equal(t, "spec.kvEvents.mode", m.Notes[0].Path)
	}
	m, err = read("tcp://*:5557", "entries")
	assert.NoError(t, err)
	assert.Empty(t, m.Notes)
}
