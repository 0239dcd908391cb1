// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
)

// A synthetic probe's prompt is of some 200 tokens of random text: no cache has even its first block, and it has whole
// blocks, which alone are transferred. Of a response of one token, P might be the only engine.
const (
	probeCharacters = 512
	probeTokens     = 8
	probeResponse   = 1 << 20 // bytes of the response that are read
)

var errProbe = errors.New("pdflow: the engines did not serve the synthetic probe together")

// Probe sends a synthetic probe through a pair: a completion of a short prompt that no engine has seen. It returns nil
// if the two engines have served it together, until ctx ends. model is the model to ask for, "" for none; header stands
// for the client's header (an Authorization for the engines), and may be nil. An error is an [*Error] where a request
// would fail with one: CodeTimeout if ctx's deadline was over. The picker is neither asked nor told. It may be called
// concurrently.
func (f *Flow) Probe(ctx context.Context, prefill, decode discovery.Endpoint, model string,
	header http.Header) (err error) {
	defer func() {
		if r := recover(); r != nil { // of a connector or a transport: nobody else is there for it
			err = f.crashed(nil, "probe", r)
		}
	}()
	var prompt strings.Builder
	for prompt.Len() < probeCharacters {
		prompt.WriteString(rand.Text() + " ")
	}
	body, _ := json.Marshal(struct {
		Model       string `json:"model,omitempty"`
		Prompt      string `json:"prompt"`
		MaxTokens   int    `json:"max_tokens"`
		Temperature int    `json:"temperature"`
		Stream      bool   `json:"stream"` // so that Timeouts.Transfer limits it, too
	}{model, prompt.String(), probeTokens, 0, true}) // cannot fail: these are strings and numbers
	resp, err := f.Do(ctx, &Request{API: connector.APICompletions, Header: header, Body: body,
		Pick: &Pick{Prefill: prefill, Decode: decode}})
	if err != nil {
		return err
	}
	defer resp.Body.Close() // also after a panic, or the request would never end
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, probeResponse))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return err
	}
	if resp.Status != http.StatusOK || resp.Mode != ModeDisaggregated {
		return errProbe
	}
	return nil
}
