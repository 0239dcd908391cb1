// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// Asker sends one /v1/completions request and returns the whole response. body is JSON. mode says how the request was
// served (X-PD-Mode), "" if that is unknown. The error is for requests that got no response.
type Asker func(ctx context.Context, body []byte) (status int, mode string, response []byte, err error)

// maxResponse is the largest response to a synthetic probe that is read, in bytes.
const maxResponse = 4 << 20

// Gateway returns an Asker that sends requests to a gateway, or an engine, at a base URL. header is added to each
// request (an API key); it may be nil.
func Gateway(base string, client *http.Client, header http.Header) Asker {
	base = strings.TrimSuffix(base, "/")
	return func(ctx context.Context, body []byte) (int, string, []byte, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+connector.APICompletions.Path(),
			bytes.NewReader(body))
		if err != nil {
			return 0, "", nil, err
		}
		maps.Copy(req.Header, header)
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		if err != nil {
			return 0, "", nil, err
		}
		defer resp.Body.Close()
		response, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
		return resp.StatusCode, resp.Header.Get("X-PD-Mode"), response, err
	}
}

// Flow returns an Asker that sends requests through a flow of this program, to two engines whatever its picker decides
// of clients' requests. header stands for the client's header (an Authorization for the engines); it may be nil.
func Flow(f *pdflow.Flow, header http.Header) Asker {
	return func(ctx context.Context, body []byte) (int, string, []byte, error) {
		resp, err := f.Do(ctx, &pdflow.Request{API: connector.APICompletions, Header: header, Body: body,
			Pair: true})
		if err != nil {
			var e *pdflow.Error
			if !errors.As(err, &e) {
				return 0, "", nil, err
			}
			// cannot fail: these are two strings
			response, _ := json.Marshal(map[string]any{"error": map[string]any{"code": e.Code, "message": e.Message}})
			return e.HTTPStatus(), "", response, nil
		}
		response, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
		return resp.Status, string(resp.Mode), response, errors.Join(err, resp.Body.Close())
	}
}

// SyntheticProbe is one request that a verification sent, and its outcome.
type SyntheticProbe struct {
	Status       int           `json:"status"`         // of the response; 0: there was none
	Code         string        `json:"code,omitempty"` // pdkit's or the engine's error code, if the status is not 200
	Mode         string        `json:"mode,omitempty"` // X-PD-Mode
	PromptTokens int64         `json:"promptTokens"`   // from the response's usage
	Reused       int64         `json:"reused"`         // prompt tokens whose KV decode took over
	Bytes        int64         `json:"bytes"`          // of KV that moved for them, if an engine counts bytes
	Took         time.Duration `json:"-"`              // as JSON it is tookSeconds
	Text         string        `json:"-"`              // the response's
	prompt       string
}

// MarshalJSON writes the fields, and Took as a number of seconds.
func (p SyntheticProbe) MarshalJSON() ([]byte, error) {
	type fields SyntheticProbe
	return json.Marshal(struct {
		fields
		Took float64 `json:"tookSeconds"`
	}{fields(p), p.Took.Seconds()})
}

// newPrompt returns a prompt that is random from its first character, so that no cache has even its first block.
func newPrompt(characters int) string {
	const filler = " and the keys and values of this prompt move from the engine that computed them to the engine " +
		"that needs them"
	b := strings.Builder{}
	b.WriteString(rand.Text())
	for b.Len() < characters {
		b.WriteString(filler)
	}
	return b.String()[:max(characters, 1)]
}

// sizedPrompt returns a prompt of about that many tokens. It asks the engine's /tokenize how many tokens a prompt has;
// without /tokenize it takes four characters for a token.
func sizedPrompt(ctx context.Context, client *http.Client, engine, model string, tokens int) string {
	prompt := newPrompt(4 * tokens)
	n := tokenise(ctx, client, engine, model, prompt)
	if n <= 0 {
		return prompt
	}
	// no tokenizer makes so few tokens of a text, whatever an engine says
	return newPrompt(max(1, min(4*tokens*tokens/n, 16*tokens)))
}

func tokenise(ctx context.Context, client *http.Client, engine, model, prompt string) int {
	body, _ := json.Marshal(struct {
		Model  string `json:"model,omitempty"`
		Prompt string `json:"prompt"`
	}{model, prompt}) // cannot fail: these are strings
	var response struct {
		Count int `json:"count"`
	}
	if readJSON(ctx, client, http.MethodPost, engine, "/tokenize", body, &response) != nil {
		return 0
	}
	return response.Count
}

// completion returns the request for a prompt. It samples greedily, so that the prompt decides the text.
func completion(model, prompt string, maxTokens int, salt string) []byte {
	body, _ := json.Marshal(struct {
		Model       string `json:"model,omitempty"`
		Prompt      string `json:"prompt"`
		MaxTokens   int    `json:"max_tokens"`
		Temperature int    `json:"temperature"`
		Salt        string `json:"cache_salt,omitempty"`
	}{model, prompt, maxTokens, 0, salt}) // cannot fail: these are strings and numbers
	return body
}

type completionResponse struct {
	Choices []struct {
		Text string `json:"text"`
	} `json:"choices"`
	Usage struct {
		PromptTokens int64 `json:"prompt_tokens"`
	} `json:"usage"`
	Error struct {
		Code any `json:"code"`
	} `json:"error"`
}

func ask(ctx context.Context, to Asker, body []byte) (SyntheticProbe, error) {
	began := time.Now()
	status, mode, response, err := to(ctx, body)
	p := SyntheticProbe{Status: status, Mode: mode, Took: time.Since(began)}
	if err != nil {
		return p, err
	}
	var a completionResponse
	if err := json.Unmarshal(response, &a); err != nil {
		if status == http.StatusOK {
			return p, errors.New("the response is not a JSON object")
		}
		return p, nil
	}
	if status != http.StatusOK {
		if a.Error.Code != nil {
			p.Code = fmt.Sprint(a.Error.Code)
		}
		return p, nil
	}
	p.PromptTokens = int64(plausible(float64(a.Usage.PromptTokens)))
	if len(a.Choices) > 0 {
		p.Text = a.Choices[0].Text
	}
	return p, nil
}
