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

// Asker sends one /v1/completions request, whose body is JSON, and returns the whole answer. mode is how it was served
// (X-PD-Mode), "" where nobody tells. The error is for requests that got no answer.
type Asker func(ctx context.Context, body []byte) (status int, mode string, answer []byte, err error)

// maxAnswer is the largest answer to a probe that is read, in bytes.
const maxAnswer = 4 << 20

// Gateway asks a gateway, or an engine, at a base URL. header is added to each request (an API key); nil allowed.
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
		answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
		return resp.StatusCode, resp.Header.Get("X-PD-Mode"), answer, err
	}
}

// Flow asks a flow of this program. header is the client's (an Authorization for the engines); nil allowed.
func Flow(f *pdflow.Flow, header http.Header) Asker {
	return func(ctx context.Context, body []byte) (int, string, []byte, error) {
		resp, err := f.Do(ctx, &pdflow.Request{API: connector.APICompletions, Header: header, Body: body})
		if err != nil {
			var e *pdflow.Error
			if !errors.As(err, &e) {
				return 0, "", nil, err
			}
			// of two strings: never fails
			answer, _ := json.Marshal(map[string]any{"error": map[string]any{"code": e.Code, "message": e.Message}})
			return e.HTTPStatus(), "", answer, nil
		}
		answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
		return resp.Status, string(resp.Mode), answer, errors.Join(err, resp.Body.Close())
	}
}

// SyntheticProbe is one request that a verification sent, and its outcome.
type SyntheticProbe struct {
	Status       int    // of the answer; 0: none came
	Code         string // pdkit's or the engine's error code, where the status is not 200
	Mode         string // X-PD-Mode
	PromptTokens int64  // as the answer's usage states them
	Reused       int64  // of these, tokens that decode took over
	Bytes        int64  // of KV that moved for it, where an engine counts them
	Took         time.Duration
	Text         string // the answer's
	prompt       string
}

// prompts are random from their first character, so that not even a first block is in any cache.
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

// sizedPrompt makes a prompt of about so many tokens. An engine's /tokenize tells how long one is; without it, four
// characters are taken for a token.
func sizedPrompt(ctx context.Context, client *http.Client, engine, model string, tokens int) string {
	prompt := newPrompt(4 * tokens)
	n := tokenise(ctx, client, engine, model, prompt)
	if n <= 0 {
		return prompt
	}
	// no tokenizer makes so few tokens of text, whatever an engine says
	return newPrompt(max(1, min(4*tokens*tokens/n, 16*tokens)))
}

func tokenise(ctx context.Context, client *http.Client, engine, model, prompt string) int {
	if engine == "" {
		return 0
	}
	body, _ := json.Marshal(struct {
		Model  string `json:"model,omitempty"`
		Prompt string `json:"prompt"`
	}{model, prompt}) // of strings: never fails
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, engine+"/tokenize", bytes.NewReader(body))
	if err != nil {
		return 0
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	var answer struct {
		Count int `json:"count"`
	}
	if resp.StatusCode != http.StatusOK ||
		json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&answer) != nil {
		return 0
	}
	return answer.Count
}

// completion is the request for a prompt: greedy, so that its text is a function of the prompt.
func completion(model, prompt string, maxTokens int, salt string) []byte {
	body, _ := json.Marshal(struct {
		Model       string `json:"model,omitempty"`
		Prompt      string `json:"prompt"`
		MaxTokens   int    `json:"max_tokens"`
		Temperature int    `json:"temperature"`
		Salt        string `json:"cache_salt,omitempty"`
	}{model, prompt, maxTokens, 0, salt}) // of strings and numbers: never fails
	return body
}

type completionAnswer struct {
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
	status, mode, answer, err := to(ctx, body)
	p := SyntheticProbe{Status: status, Mode: mode, Took: time.Since(began)}
	if err != nil {
		return p, err
	}
	var a completionAnswer
	if err := json.Unmarshal(answer, &a); err != nil {
		if status == http.StatusOK {
			return p, errors.New("the answer is not a JSON object")
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
