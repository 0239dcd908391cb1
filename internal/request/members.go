// SPDX-License-Identifier: Apache-2.0

package request

import (
	"math"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// P must not compute a prompt for which D then refuses the request: nobody would read P's KV, and it would hold P's
// blocks until its lease ends. P itself does not see the members that its leg loses or changes, so CheckMembers holds
// each of them to the rules of the engines that would read them on D. The rules' sources are in docs/protocols/vllm.md
// §4.

// Loss says what takes a member's own value from a prefill leg.
type Loss uint8

// What takes it.
const (
	ByLimit  Loss = iota // the limit of tokens
	ToOne                // a prefill leg asks for 1
	Dropped              // a prefill leg lacks it
	ByEnding             // one that must end by length lacks it
)

// Member is a member that a prefill leg loses or changes, with the engines' rule for it.
type Member struct {
	Name string
	Loss Loss
	rule rule
}

// rule returns what is wrong with a value that is not null, or "".
type rule func(raw []byte) string

// integral is the rule of vLLM's request models: they also read 16.0 as 16.
func integral(least int64) rule {
	low := "must be at least " + strconv.FormatInt(least, 10)
	return func(raw []byte) string {
		switch n, ok := integer(raw); {
		case !ok:
			return notInteger
		case n < least:
			return low
		}
		return ""
	}
}

const notInteger = "must be an integer within 64 bits"

// strictIntegral is the rule of SGLang's /generate: its sampling_params are sent to the scheduler as they came, which
// then fails to read 16.0 as an integer.
func strictIntegral(raw []byte) string {
	if _, ok := jsonedit.Int(raw); !ok {
		return notInteger
	}
	return ""
}

// integral64 is the rule of an integer without a least value, or with one that another member changes.
var integral64 = integral(math.MinInt64)

func strictMinimum(raw []byte) string {
	if raw[0] == '-' {
		return "must be at least 0"
	}
	return strictIntegral(raw)
}

// logprobCount is integral(-1), and also a boolean, which Python counts as a number.
func logprobCount(raw []byte) string {
	if jsonedit.Kind(raw) == jsonedit.Bool {
		return ""
	}
	return integralLogprobs(raw)
}

var integralLogprobs = integral(-1)

// boolean is what pydantic reads as a boolean: also the numbers 0 and 1, and some words.
func boolean(raw []byte) string {
	switch n, isNumber := integer(raw); {
	case jsonedit.Kind(raw) == jsonedit.Bool, isNumber && (n == 0 || n == 1):
		return ""
	case jsonedit.Kind(raw) == jsonedit.String:
		switch strings.ToLower(strings.Trim(string(raw), `"`)) {
		case "0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes":
			return ""
		}
	}
	return "must be true or false"
}

func tokenIDs(raw []byte) string {
	return each(raw, "must be a list of integers from 0 within 64 bits", func(item []byte) bool {
		n, ok := integer(item)
		return ok && n >= 0
	})
}

func list(raw []byte) string {
	return each(raw, "must be a list", func([]byte) bool { return true })
}

// texts is a list of strings that are not empty.
func texts(raw []byte) string {
	return each(raw, "must be a list of strings that are not empty", func(item []byte) bool {
		return jsonedit.Kind(item) == jsonedit.String && len(item) > 2
	})
}

func textOrTexts(raw []byte) string {
	if jsonedit.Kind(raw) == jsonedit.String && len(raw) > 2 {
		return ""
	}
	return texts(raw)
}

// falsyTextOrTexts is textOrTexts of /v1/responses, where an empty string is no stop string.
func falsyTextOrTexts(raw []byte) string {
	if string(raw) == `""` {
		return ""
	}
	return textOrTexts(raw)
}

// each returns problem unless raw is an array whose items all pass ok.
func each(raw []byte, problem string, ok func(item []byte) bool) string {
	for item := range jsonedit.Items(raw) {
		if item == nil || !ok(item) {
			return problem
		}
	}
	return ""
}

// integer returns the value of a number that the engines read as an integer within 64 bits: 16, and also 16.0.
func integer(raw []byte) (int64, bool) {
	if n, ok := jsonedit.Int(raw); ok {
		return n, true
	}
	if jsonedit.Kind(raw) != jsonedit.Number || !strings.ContainsAny(string(raw), ".eE") {
		return 0, false
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || f != math.Trunc(f) || f < math.MinInt64 || f >= math.MaxInt64 {
		return 0, false
	}
	return int64(f), true
}

// CheckMembers returns a *[Fault] if D would refuse a member that the prefill leg loses or changes, or an empty
// prompt. sglang is true if the protocol has SGLang's rooms, so that the prefill leg keeps more members. ends is true
// if the leg must end by length.
func (r *Request) CheckMembers(sglang, ends bool) error {
	i := r.API.Info()
	d, prefix := r.SamplingDoc(), ""
	if i.Sampling != "" {
		prefix = i.Sampling + "."
	}
	for k := range i.Members {
		m := &i.Members[k]
		if m.Loss == ByEnding && !ends || m.Loss != ByLimit && sglang {
			continue
		}
		raw, ok := Field(d, m.Name)
		if !ok {
			continue
		}
		if problem := m.rule(raw); problem != "" {
			return &Fault{Param: prefix + m.Name, Message: problem}
		}
	}
	name, problem := i.checkLimits(r, d, sglang)
	if problem != "" {
		return &Fault{Param: prefix + name, Message: problem}
	}
	if name = r.emptyPrompt(); name != "" {
		return &Fault{Param: name, Message: "must not be empty"}
	}
	if name, problem = r.checkStreamOptions(sglang); problem != "" {
		return &Fault{Param: name, Message: problem}
	}
	if sglang {
		return nil // it reads the members that follow otherwise, and its prefill legs do not lose them
	}
	if name, problem = r.checkPairs(); problem != "" {
		return &Fault{Param: name, Message: problem}
	}
	return nil
}

// checkLimits holds the limit of tokens to the engines' least one, and the minimum to the limit.
func (i *Info) checkLimits(r *Request, d *jsonedit.Doc, sglang bool) (name, problem string) {
	name = i.Limit
	if _, ok := Field(d, i.AltLimit); ok && i.AltLimit != "" {
		name = i.AltLimit
	}
	least := i.Least
	switch {
	case sglang && r.API == Responses:
		least = 2 // SGLang takes two off
	case !sglang && r.API == Completions && r.truthy("echo"):
		least = 0 // vLLM then returns the prompt alone
	}
	limit := i.Implied
	raw, there := d.Get(name)
	null := there && jsonedit.Kind(raw) == jsonedit.Null
	switch {
	case (!there || null) && r.API == Messages, null && sglang && r.API == Completions:
		return name, "must be given"
	case null && i.Sampling != "":
		limit = math.MaxInt64 // null is no limit, while an absent one is 16, or SGLang's 128
	case there && !null:
		limit, _ = integer(raw)
		if limit < least {
			return name, "must be at least " + strconv.FormatInt(least, 10)
		}
	}
	if raw, ok := Field(d, i.Minimum); ok && i.Minimum != "" {
		if n, _ := integer(raw); n > limit {
			return i.Minimum, "must not be above the limit of tokens"
		}
	}
	return "", ""
}

// emptyPrompt returns the member that holds a prompt of no tokens, or "". Text that a chat template surrounds is never
// empty.
func (r *Request) emptyPrompt() string {
	names := []string{r.API.Info().Prompt}
	switch r.API {
	case Chat, Responses, Messages:
		return ""
	case Completions:
		if raw, ok := r.Field("prompt_embeds"); ok && !emptyPrompt(raw) {
			return ""
		}
	case SGLang:
		names = append(names, "input_ids")
	}
	for _, name := range names {
		if raw, ok := r.Field(name); ok && emptyPrompt(raw) {
			return name
		}
	}
	return ""
}

// LacksPrompt returns the member without which every engine refuses the request, or "".
func (r *Request) LacksPrompt() string {
	i := r.API.Info()
	raw, there := r.Field(i.Prompt)
	_, embeds := r.Field("prompt_embeds")
	messages := r.API == Chat || r.API == Messages
	if there && !(messages && emptyArray(raw)) || embeds && r.API == Completions {
		return ""
	}
	return i.Prompt
}

// emptyPrompt reports whether a prompt, or the only one of a list, is empty.
func emptyPrompt(raw []byte) bool {
	if jsonedit.Kind(raw) != jsonedit.Array || severalPrompts(raw) {
		return string(raw) == `""`
	}
	for first := range jsonedit.Items(raw) {
		return string(first) == `""` || emptyArray(first)
	}
	return true
}

// severalPrompts reports whether a JSON array holds more than one prompt. An array of numbers is one prompt of token
// ids; an array of strings, arrays or objects is a list of prompts. It reads only the first element, so a prompt of a
// million tokens costs nothing.
func severalPrompts(raw []byte) bool {
	n := 0
	for item := range jsonedit.Items(raw) {
		if kind := jsonedit.Kind(item); n == 0 && kind != jsonedit.String && kind != jsonedit.Array &&
			kind != jsonedit.Object {
			return false
		}
		if n++; n == 2 {
			return true
		}
	}
	return false
}

func emptyArray(raw []byte) bool {
	if jsonedit.Kind(raw) != jsonedit.Array {
		return false
	}
	for range jsonedit.Items(raw) {
		return false
	}
	return true
}

// checkStreamOptions checks stream_options, which every prefill leg loses. SGLang accepts them without a stream.
func (r *Request) checkStreamOptions(sglang bool) (name, problem string) {
	raw, ok := r.Field("stream_options")
	if !ok || r.API != Chat && r.API != Completions && r.API != Generate {
		return "", ""
	}
	d, err := jsonedit.Parse(raw)
	if err != nil {
		return "stream_options", "is not a well-formed object"
	}
	if d.Len() > 0 && !r.Stream && r.API != Generate && !sglang {
		return "stream_options", "needs stream: true"
	}
	for _, flag := range [...]string{"include_usage", "continuous_usage_stats"} {
		if v, ok := Field(d, flag); ok && boolean(v) != "" {
			return "stream_options." + flag, boolean(v)
		}
	}
	return "", ""
}

// checkPairs checks members that vLLM refuses because of another one.
func (r *Request) checkPairs() (name, problem string) {
	switch r.API {
	case Chat, Completions:
		_, asked := r.Field("logprobs")
		if r.API == Chat {
			asked = asked && r.truthy("logprobs")
			if top, ok := r.Field("top_logprobs"); ok && !asked {
				if n, _ := integer(top); n != 0 || string(top) == "true" {
					return "top_logprobs", "needs logprobs: true"
				}
			}
		}
		if list, ok := r.Field("logprob_token_ids"); ok && !emptyArray(list) && !asked {
			return "logprob_token_ids", "needs logprobs"
		}
	case Generate:
		return r.checkScores()
	case Messages:
		return r.checkThinking()
	}
	return "", ""
}

// checkScores holds the members of /inference/v1/generate about log probabilities to vLLM's rules for two of them.
func (r *Request) checkScores() (name, problem string) {
	_, start := r.sampling("prompt_logprob_start")
	if _, rows := r.sampling("prompt_logprob_token_ids"); start && !rows {
		return "sampling_params.prompt_logprob_start", "needs prompt_logprob_token_ids"
	}
	ids, listed := r.sampling("logprob_token_ids")
	raw, asked := r.sampling("logprobs")
	if !listed || !asked {
		return "", ""
	}
	count := int64(0)
	each(ids, "", func([]byte) bool { count++; return true })
	n, _ := integer(raw)
	if string(raw) == "true" {
		n = 1
	}
	if n != count {
		return "sampling_params.logprobs", "must be the number of logprob_token_ids"
	}
	return "", ""
}

// checkThinking holds a thinking budget to vLLM's rules: P's leg carries it without them, or not at all
// (contract.NewPrefillLeg).
func (r *Request) checkThinking() (name, problem string) {
	raw, ok := r.Field("thinking")
	if !ok {
		return "", ""
	}
	if jsonedit.Kind(raw) != jsonedit.Object {
		return "thinking", "must be an object"
	}
	d, err := jsonedit.Parse(raw)
	if err != nil {
		return "thinking", "is not a well-formed object"
	}
	switch kind, _ := Field(d, "type"); string(kind) {
	case `"disabled"`, `"adaptive"`:
		return "", ""
	case `"enabled"`:
	default:
		return "thinking.type", "must be enabled, disabled or adaptive"
	}
	budget, _ := d.Get("budget_tokens")
	limit, _ := r.Field("max_tokens")
	most, _ := integer(limit)
	switch n, ok := integer(budget); {
	case !ok:
		return "thinking.budget_tokens", notInteger
	case n < 1024:
		return "thinking.budget_tokens", "must be at least 1024"
	case n >= most:
		return "thinking.budget_tokens", "must be less than max_tokens"
	}
	return "", ""
}
