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
	"slices"
	"time"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/kvparams"
)

// conversational is the connector with bidirectional: after a turn of a conversation D keeps the KV of prompt and answer and says so in
// its whole answer, and P takes it for the next turn, where it would compute the answer's part anew (vLLM 0.32.0, recorded exchanges, and
// vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py: bidirectional_kv_xfer).
//
// P takes the KV by position and compares no tokens, so a prompt that does not begin with exactly the tokens of the last turn is
// answered wrongly, with 200; so is one whose handoff was used before. Equal text is no proof: an answer's text may be tokenized in another way than it was sampled, and chat templates
// rewrite what was said. So D is asked for its token ids, P for those of the next prompt (/render), and they are compared.
type conversational struct {
	*Connector

	turns *turns
	life  time.Duration // of a turn, from D's answer
}

// longestMargin is the most that is left of D's time for P's queue and transfer, since nothing extends it. A short time is halved. P
// itself declines, with a 500, to take KV in the last 5 s.
const longestMargin = 30 * time.Second

func newConversational(c *Connector) *conversational {
	ttl := c.opts.conversationTTL()
	return &conversational{Connector: c, turns: &turns{}, life: ttl - min(longestMargin, ttl/2)}
}

// maxConversationName bounds what a client can make the memory hold.
const maxConversationName = 256

// key names a conversation, "" if the request belongs to none. KV of another model or cache salt is other KV. It is a digest, since both
// may be as long as the client likes.
func (c *conversational) key(s *connector.Session) string {
	name := s.Header.Get(c.opts.conversationHeader())
	if name == "" || len(name) > maxConversationName {
		return ""
	}
	switch s.API {
	case connector.APIChat, connector.APICompletions, connector.APIGenerate:
	default:
		return "" // their answers hold no token ids
	}
	for _, member := range []string{"prompt_embeds", "features", "content_parts"} {
		if _, ok := s.Field(member); ok {
			return "" // tokens do not tell these prompts apart
		}
	}
	salt, _ := s.Field("cache_salt")
	h := sha256.New()
	for _, part := range []string{s.Model, string(salt), name} {
		_, _ = fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	return string(h.Sum(nil))
}

// remembers reports whether the answer is of use for a next turn: streams never tell where D's KV is.
func (c *conversational) remembers(s *connector.Session) bool {
	return !s.Request.Stream && c.key(s) != ""
}

// Prepare finds the last turn's KV, if this prompt provably extends that turn. All that fails here costs no more than a prefill.
func (c *conversational) Prepare(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
	key := c.key(s)
	if key == "" {
		return nil, nil
	}
	last := c.turns.get(key, time.Now())
	// The pick of this attempt vouches that D is still there.
	if last == nil || last.decode != s.Decode.ID {
		return nil, nil
	}
	prompt, err := promptTokens(ctx, s, call)
	if err != nil || !last.extends(prompt) || !c.turns.take(last) {
		return nil, ctx.Err()
	}
	return last, nil
}

// Prefill is [Connector.Prefill], with the last turn's handoff where there is one.
func (c *conversational) Prefill(ctx context.Context, s *connector.Session, leg *connector.Leg) error {
	last, ok := s.Prepared().(*turn)
	if !ok {
		return c.Connector.Prefill(ctx, s, leg)
	}
	leg.Normalize()
	leg.Params(last.handoff)
	return nil
}

const returnTokenIDs = "return_token_ids"

// Decode is [Connector.Decode], and asks D for token ids.
func (c *conversational) Decode(ctx context.Context, s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
	if err := c.Connector.Decode(ctx, s, p, leg); err != nil {
		return err
	}
	if s.API != connector.APIGenerate && c.remembers(s) {
		leg.Set(returnTokenIDs, json.RawMessage("true"))
	}
	return nil
}

// Rewrite remembers D's whole answer, if that is of use, and takes out of it what the client is not to see: D says of each where its KV
// lies. Streams do not have that, and stay unparsed.
func (c *conversational) Rewrite(s *connector.Session, _ func() *connector.PrefillResult) connector.EventFunc {
	if s.Request.Stream {
		return nil
	}
	remembers := c.remembers(s)
	return func(answer []byte) ([]byte, error) {
		if remembers {
			c.remember(s, answer)
		}
		return clientsView(s, answer, remembers), nil
	}
}

// remember keeps what D's answer says of its KV, if it says it and gives the tokens.
func (c *conversational) remember(s *connector.Session, answer []byte) {
	if !gjson.ValidBytes(answer) {
		return
	}
	raw := gjson.GetBytes(answer, connector.ParamsMember).Raw
	if raw == "" || kvparams.NIXL(json.RawMessage(raw), kvparams.RemoteDecode, nil) != nil {
		return
	}
	n := gjson.Get(raw, "remote_num_tokens").Int()
	prompt, answered := gjson.GetBytes(answer, promptPath(s.API)).Raw, gjson.GetBytes(answer, "choices.0.token_ids").Raw
	if s.API == connector.APIGenerate {
		ids, _ := s.Field("token_ids")
		prompt = string(ids)
	}
	tokens, err := tokenIDs([]byte(prompt))
	more, err2 := tokenIDs([]byte(answered))
	tokens = append(tokens, more...)
	if err != nil || err2 != nil || n < 1 || n > int64(len(tokens)) {
		return
	}
	now := time.Now()
	c.turns.put(&turn{key: c.key(s), decode: s.Decode.ID, handoff: json.RawMessage(raw), n: int(n), digest: digest(tokens[:n]), expires: now.Add(c.life)}, now)
}

// promptPath is where an answer repeats the prompt's token ids (docs/protocols/vllm.md §9).
func promptPath(api connector.API) string {
	if api == connector.APIChat {
		return "prompt_token_ids"
	}
	return "choices.0.prompt_token_ids"
}

// clientsView is D's answer without the engines' affairs, which are null where nobody asked for them. tokens tells that D may have been
// asked for token ids.
func clientsView(s *connector.Session, answer []byte, tokens bool) []byte {
	paths := []string{connector.ParamsMember}
	if asked, _ := s.Field(returnTokenIDs); tokens && s.API != connector.APIGenerate && string(asked) != "true" {
		paths = append(paths, promptPath(s.API), "choices.0.token_ids")
	}
	for _, path := range paths {
		if v := gjson.GetBytes(answer, path); !v.Exists() || v.Type == gjson.Null {
			continue
		}
		if changed, err := sjson.SetRawBytes(answer, path, []byte("null")); err == nil {
			answer = changed
		}
	}
	return answer
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

// maxRendered is the largest answer of /render that is read: a million tokens, with their sampling parameters.
const maxRendered = 16 << 20

// promptTokens asks P which tokens a prompt has. vLLM serves that beside each API, as the request that /inference/v1/generate would take
// (0.32.0's OpenAPI document: GenerateRequest; a list of them for completions).
func promptTokens(ctx context.Context, s *connector.Session, call connector.Caller) ([]uint32, error) {
	if s.API == connector.APIGenerate {
		ids, _ := s.Field("token_ids")
		return tokenIDs(ids)
	}
	leg := connector.NewLeg(s.Request)
	leg.Normalize()
	body, err := leg.Body()
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
	if auth := s.Header.Values("Authorization"); len(auth) > 0 {
		r.Header["Authorization"] = slices.Clone(auth)
	}
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

// renderedTokens reads the token ids of one rendered prompt. Prompts with media have features besides, which token ids do not tell apart.
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
