// SPDX-License-Identifier: Apache-2.0

package nixl

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/kvparams"
	"github.com/pdkit/pdkit/internal/contract"
)

// conversational is the connector with the setting bidirectional. After each turn of a conversation D keeps the KV of
// the prompt and of the response, and says in its response where that KV is: in a whole one, and from vLLM 0.33.0 on in
// a stream's last chunk, too. At the next turn P reads this KV instead of computing the response's part of the prompt
// (vLLM 0.32.0, recorded exchanges, and vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py:
// bidirectional_kv_xfer; docs/protocols/vllm.md §1).
//
// P takes the KV by position and does not compare tokens. If the prompt does not begin with exactly the tokens of the
// last turn, or if the handoff was used before, P answers 200 with a wrong text. Equal text does not prove equal
// tokens: a response's text may be tokenized differently from how it was sampled, and chat templates rewrite earlier
// messages. So the connector asks D for its token ids and P for those of the next prompt (/render), and compares the
// two.
type conversational struct {
	*Connector

	turns *turns
	life  time.Duration // how long a turn is of use, counted from D's response
}

// longestMargin is the longest part of D's TTL that is kept back for P's queue and transfer, since nothing extends the
// TTL. Of a short TTL half is kept back. In the last 5 s P itself refuses to take the KV, with a 500.
const longestMargin = 30 * time.Second

func newConversational(c *Connector) *conversational {
	ttl := c.opts.conversationTTL()
	return &conversational{Connector: c, turns: &turns{}, life: ttl - min(longestMargin, ttl/2)}
}

// maxConversationName is the longest name, in bytes, that a client may give a conversation: it bounds the memory.
const maxConversationName = 256

// key names a conversation; it is "" if the request belongs to none. The KV of another model or another cache salt is
// other KV, so both are part of the key. The key is a digest, since a client's name and salt may be long.
func (c *conversational) key(s *connector.Session) string {
	name := s.Header.Get(c.opts.conversationHeader())
	if name == "" || len(name) > maxConversationName {
		return ""
	}
	switch s.API {
	case connector.APIChat, connector.APICompletions, connector.APIGenerate:
	default:
		return "" // the responses of the other APIs hold no token ids
	}
	for _, member := range []string{"prompt_embeds", "features", "content_parts"} {
		if _, ok := s.Field(member); ok {
			return "" // two such prompts can have the same tokens
		}
	}
	salt, _ := s.Field("cache_salt")
	h := sha256.New()
	for _, part := range []string{s.Model, string(salt), name} {
		_, _ = fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	return string(h.Sum(nil))
}

// remembers reports whether the next turn can use this response. A stream of the generate API does not say where D's KV
// is.
func (c *conversational) remembers(s *connector.Session) bool {
	return (!s.Request.Stream || s.API != connector.APIGenerate) && c.key(s) != ""
}

// Traits are those of [Connector.Traits], and say that D names its own KV.
func (c *conversational) Traits() connector.Traits {
	t := c.Connector.Traits()
	t.Handoff.FromDecode = true
	return t
}

// Prepare finds the last turn's KV if this prompt is proven to extend that turn. If anything here fails, P computes the
// whole prompt, as without this connector.
func (c *conversational) Prepare(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
	key := c.key(s)
	if key == "" {
		return nil, nil
	}
	last := c.turns.get(key, time.Now())
	// This attempt's picker chose this D from the engines that are there now, so D still exists.
	if last == nil || last.decode != s.Decode.ID {
		return nil, nil
	}
	prompt, err := promptTokens(ctx, s, call)
	if err != nil || !last.extends(prompt) || !c.turns.take(last) {
		return nil, ctx.Err()
	}
	return last, nil
}

// Prefill is [Connector.Prefill], but with the last turn's handoff if Prepare found one.
func (c *conversational) Prefill(ctx context.Context, s *connector.Session, leg *connector.Leg) error {
	last, ok := s.Prepared.(*turn)
	if !ok {
		return c.Connector.Prefill(ctx, s, leg)
	}
	leg.Params(last.handoff)
	return nil
}

const returnTokenIDs = "return_token_ids"

// Decode is [Connector.Decode], and also asks D for token ids.
func (c *conversational) Decode(ctx context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	if err := c.Connector.Decode(ctx, s, p, leg); err != nil {
		return err
	}
	if s.API != connector.APIGenerate && c.remembers(s) {
		leg.Set(returnTokenIDs, json.RawMessage("true"))
	}
	return nil
}

// Rewrite remembers D's response if the next turn can use it, and removes the token ids that only the connector asked
// for. The flow removes what D says of its KV.
func (c *conversational) Rewrite(s *connector.Session, _ func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	if !c.remembers(s) {
		return nil
	}
	r := &response{c: c, s: s, prompt: promptPath(s.API)}
	if s.API == connector.APIGenerate {
		ids, _ := s.Field("token_ids")
		r.add(string(ids))
	} else if asked, _ := s.Field(returnTokenIDs); string(asked) != "true" {
		r.hidden = []string{r.prompt, outputPath}
	}
	return r.event
}

// response is one response of D: a whole one, or the chunks of a stream.
type response struct {
	c      *conversational
	s      *connector.Session
	prompt string   // where the prompt's token ids are
	hidden []string // what the client did not ask for
	tokens []uint32 // of the prompt, and of the output so far
	bad    bool     // the ids are not to be relied on
}

// outputPath is where a response, or a chunk of one, has the token ids of its output.
const outputPath = "choices.0.token_ids"

// event reads a whole response or one chunk, and returns it as the client gets it.
func (r *response) event(data []byte) ([]byte, error) {
	if len(r.tokens) == 0 { // the prompt's ids come once, before those of the output
		if r.add(gjson.GetBytes(data, r.prompt).Raw); len(r.tokens) == 0 {
			return r.clientsView(data), nil
		}
	}
	r.add(gjson.GetBytes(data, outputPath).Raw)
	r.remember(data)
	return r.clientsView(data), nil
}

// add adds a list of token ids. Chunks without tokens have none.
func (r *response) add(raw string) {
	if raw == "" || raw == "null" {
		return
	}
	ids, err := tokenIDs([]byte(raw))
	r.tokens, r.bad = append(r.tokens, ids...), r.bad || err != nil
}

// remember keeps what D says about its KV, if data has it and the token ids are known.
func (r *response) remember(data []byte) {
	raw := gjson.GetBytes(data, connector.ParamsMember).Raw
	if r.bad || raw == "" || !gjson.ValidBytes(data) ||
		kvparams.NIXL(json.RawMessage(raw), kvparams.RemoteDecode) != nil {
		return
	}
	n := gjson.Get(raw, "remote_num_tokens").Int()
	if n < 1 || n > int64(len(r.tokens)) {
		return
	}
	now := time.Now()
	r.c.turns.put(&turn{key: r.c.key(r.s), decode: r.s.Decode.ID, handoff: json.RawMessage(raw), n: int(n),
		digest: digest(r.tokens[:n]), expires: now.Add(r.c.life)}, now)
}

// promptPath is where a response, or a stream's first chunk, has the prompt's token ids (docs/protocols/vllm.md §9).
func promptPath(api connector.API) string {
	if api == connector.APIChat {
		return "prompt_token_ids"
	}
	return "choices.0.prompt_token_ids"
}

// clientsView is data as the client gets it: token ids that it did not ask for are null.
func (r *response) clientsView(data []byte) []byte {
	for _, path := range r.hidden {
		if v := gjson.GetBytes(data, path); !v.Exists() || v.Type == gjson.Null {
			continue
		}
		if changed, err := sjson.SetRawBytes(data, path, []byte("null")); err == nil {
			data = changed
		}
	}
	return data
}

var errNoTokens = errors.New("no token ids")

func tokenIDs(raw []byte) ([]uint32, error) {
	if !bytes.HasPrefix(raw, []byte("[")) {
		return nil, errNoTokens
	}
	var ids []uint32
	err := json.Unmarshal(raw, &ids)
	return ids, err
}

// maxRendered is the largest response of /render that is read, in bytes: a million tokens with their sampling
// parameters.
const maxRendered = 16 << 20

// promptTokens asks P which tokens a prompt has. vLLM serves /render beside each API. The response is the request that
// /inference/v1/generate would take, or a list of such requests for completions (0.32.0's OpenAPI document:
// GenerateRequest).
func promptTokens(ctx context.Context, s *connector.Session, call connector.Caller) ([]uint32, error) {
	if s.API == connector.APIGenerate {
		ids, _ := s.Field("token_ids")
		return tokenIDs(ids)
	}
	body, err := contract.Body(contract.NewPrefillLeg(s.Request, &connector.Traits{}))
	if err != nil {
		return nil, err
	}
	u := *s.Prefill.URL
	u.Path += s.API.Path() + "/render"
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := call(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, errNoTokens // a P without --enable-scale-out answers 404
	}
	rendered, err := io.ReadAll(io.LimitReader(resp.Body, maxRendered))
	if err != nil {
		return nil, err
	}
	return renderedTokens(rendered)
}

// renderedTokens reads the token ids of one rendered prompt. It refuses a prompt with media: its features are not in
// the token ids, so two different prompts can have the same ids.
func renderedTokens(raw []byte) ([]uint32, error) {
	type prompt struct {
		TokenIDs     []uint32        `json:"token_ids"`
		Features     json.RawMessage `json:"features"`
		ContentParts json.RawMessage `json:"content_parts"`
	}
	var one prompt
	if bytes.HasPrefix(bytes.TrimSpace(raw), []byte("[")) {
		var all []prompt
		if err := json.Unmarshal(raw, &all); err != nil {
			return nil, err
		}
		if len(all) != 1 {
			return nil, errNoTokens
		}
		one = all[0]
	} else if err := json.Unmarshal(raw, &one); err != nil {
		return nil, err
	}
	for _, media := range []json.RawMessage{one.Features, one.ContentParts} {
		if len(media) > 0 && string(media) != "null" {
			return nil, errNoTokens
		}
	}
	return one.TokenIDs, nil
}
