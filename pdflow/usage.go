// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/verdict"
)

// count reads one of an API's usage paths from the object that verdict.Usage found, 0 without it.
func count(object, path string) int64 {
	_, inner, _ := strings.Cut(path, ".")
	return max(gjson.Get(object, inner).Int(), 0)
}

// prefillUsage notes what P says of the prompt. P's response is small, and it is known to be one JSON object.
func (a *attempt) prefillUsage(p *connector.PrefillResult) {
	paths := contract.API(a.s.API).Usage
	member, _, _ := strings.Cut(paths.Prompt, ".")
	raw, _ := p.Field(member)
	object := string(raw)
	a.out.KVTokens, a.out.Usage.Cached = count(object, paths.Prompt), count(object, paths.Cached)
}

// decodeUsage notes what D says at the end of its response.
func (a *attempt) decodeUsage(end []byte) {
	paths := contract.API(a.s.API).Usage
	member, _, _ := strings.Cut(paths.Completion, ".")
	object := verdict.Usage(end, member)
	if object == "" {
		return
	}
	u := &a.out.Usage
	u.Input, u.Output = count(object, paths.Prompt), count(object, paths.Completion)
	switch cached := count(object, paths.Cached); {
	case !a.twoLegs(): // one engine: what it reused is its cache's
		u.Cached = cached
	case a.tookOver.known:
		u.Reused = a.tookOver.tokens // the client's usage has P's count
	case a.f.traits.Serving.ReusedInUsage && !a.countsPrefills(a.p.Load()):
		u.Reused = cached
	}
}

// tookOver is D's own count of cached tokens, where the client got another one.
type tookOver struct {
	tokens int64
	known  bool
}

// correctsUsage reports whether the client gets P's count of cached tokens in place of D's.
func (a *attempt) correctsUsage() bool {
	return a.f.traits.Serving.ReusedInUsage && !a.f.opts.engineUsage && a.twoLegs() && !a.deciding() &&
		!a.countsPrefills(a.p.Load())
}

// countsPrefills reports whether D has P's count from the handoff. Engines write the key last.
func (a *attempt) countsPrefills(p *connector.PrefillResult) bool {
	t := &a.f.traits
	if t.Serving.CountKey == "" || p == nil {
		return false
	}
	raw, _ := p.Field(t.Handoff.Member)
	at := bytes.LastIndex(raw, []byte(t.Serving.CountKey+`"`))
	if at < 0 {
		return false
	}
	value := bytes.TrimLeft(raw[at+len(t.Serving.CountKey)+1:], " \t\r\n:")
	return len(value) > 0 && value[0] >= '0' && value[0] <= '9'
}

// usageMark is in each event of chats and completions that has counts.
var usageMark = []byte(`"usage"`)

// cachedMark is in each event of an API that has a count of cached tokens.
func cachedMark(api connector.API) []byte {
	path := contract.API(api).Usage.Cached
	return []byte(`"` + path[strings.LastIndexByte(path, '.')+1:] + `"`)
}

// withPrefillsCount changes the counts of cached tokens in what next returns.
func (a *attempt) withPrefillsCount(next func([]byte) ([]byte, error)) func([]byte) ([]byte, error) {
	return func(data []byte) ([]byte, error) {
		if next != nil {
			var err error
			if data, err = next(data); err != nil || data == nil {
				return data, err
			}
		}
		return a.corrected(data), nil
	}
}

// usageHolders are the objects of events that have the usage of a whole response.
var usageHolders = [...]string{"", "response.", "message."}

// corrected gives an event, or a whole response, P's count of cached tokens. What is no usage stays: only the paths of
// the API's own usage are looked at.
func (a *attempt) corrected(data []byte) []byte {
	paths := contract.API(a.s.API).Usage
	for _, holder := range usageHolders {
		cached := gjson.GetBytes(data, holder+paths.Cached)
		if cached.Type != gjson.Number {
			continue
		}
		if holder == "message." && cached.Int() == 0 {
			return data // a stream's beginning, when D has not counted yet
		}
		p := a.prefillThatCounted()
		if p == nil && !a.parallel.Load() || a.countsPrefills(p) {
			return data // D had the prompt, or knows P's count
		}
		a.tookOver = tookOver{cached.Int(), true}
		return a.counted(data, holder, p)
	}
	return data
}

// counted writes P's counts into the usage of data that stands in holder. p is nil if P's response is not there.
func (a *attempt) counted(data []byte, holder string, p *connector.PrefillResult) []byte {
	paths := contract.API(a.s.API).Usage
	of := func(path string) int64 { return gjson.GetBytes(data, holder+path).Int() }
	member, _, _ := strings.Cut(paths.Cached, ".")
	raw, _ := p.Field(member)
	cached, created := count(string(raw), paths.Cached), count(string(raw), paths.Created)
	switch a.s.API {
	case connector.APIMessages: // input_tokens are those that the cache neither gave nor took
		all := max(of(paths.Prompt)+of(paths.Cached)+of(paths.Created), 0)
		cached = min(cached, all)
		created = min(created, all-cached)
		data = withCount(data, holder+paths.Prompt, all-cached-created)
	case connector.APIResponses:
		const first = "usage.input_tokens_details.cached_tokens_per_turn.0" // P made the first turn
		turn := cached
		if gjson.GetBytes(data, holder+first).Type == gjson.Number {
			cached = max(of(paths.Cached)-of(first)+turn, 0)
		}
		data = withCount(data, holder+first, turn)
	case connector.APICompletions:
		if given := a.x.givenTokens(); given > 0 { // they are in this prompt, too, and rescue takes them off again
			cached = min(cached, max(of(paths.Prompt)-given, 0)) + given
		}
	}
	data = withCount(data, holder+paths.Cached, cached)
	return withCount(data, holder+paths.Created, created)
}

// withCount sets a number in data, if there is one.
func withCount(data []byte, path string, n int64) []byte {
	v := gjson.GetBytes(data, path)
	if v.Type != gjson.Number || v.Index <= 0 {
		return data
	}
	out := strconv.AppendInt(slices.Clip(data[:v.Index]), n, 10)
	return append(out, data[v.Index+len(v.Raw):]...)
}

// countGrace is how long the end of D's response may wait for P's, which has the count: D has P's KV, so P has ended.
const countGrace = time.Second

// prefillThatCounted returns P's response, nil if it does not come.
func (a *attempt) prefillThatCounted() *connector.PrefillResult {
	p := a.p.Load()
	if p != nil || a.pEnded == nil || !a.parallel.Load() {
		return p
	}
	timer := time.NewTimer(countGrace)
	defer timer.Stop()
	select {
	case <-a.pEnded:
	case <-timer.C:
	case <-a.ctx.Done():
	}
	return a.p.Load()
}

var jsonTrue = json.RawMessage("true")

// asksUsage reports whether the flow asks D for the counts of a stream whose client did not.
func (a *attempt) asksUsage() bool {
	req := a.s.Request
	if !a.f.opts.telemetry.Usage || !req.Stream || req.API != connector.APIChat && req.API != connector.APICompletions {
		return false
	}
	raw, ok := req.Field("stream_options")
	return !ok || !gjson.GetBytes(raw, "include_usage").Bool()
}

// withoutUsage takes out the chunk that only the flow asked for: the one with counts and without choices.
func withoutUsage(next func([]byte) ([]byte, error), note func(event []byte)) func([]byte) ([]byte, error) {
	return func(data []byte) ([]byte, error) {
		if bytes.Contains(data, []byte(`"usage"`)) {
			if choices := gjson.GetBytes(data, "choices"); choices.IsArray() && len(choices.Array()) == 0 &&
				gjson.GetBytes(data, "usage").IsObject() {
				note(data)
				return nil, nil
			}
		}
		if next != nil {
			return next(data)
		}
		return data, nil
	}
}
