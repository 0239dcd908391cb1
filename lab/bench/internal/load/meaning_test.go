// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// rewrite decodes a JSON object and writes it anew as most proxies do: members in alphabetical order, no spaces, no
// escapes that JSON does not need. edit may change the members before.
func rewrite(t *testing.T, text []byte, edit func(members map[string]any)) []byte {
	t.Helper()
	value, err := decode(text)
	require.NoError(t, err)
	members, ok := value.(map[string]any)
	require.True(t, ok)
	if edit != nil {
		edit(members)
	}
	anew, err := json.Marshal(members)
	require.NoError(t, err)
	return anew
}

// asked is one request of a client, for an engine to check.
type asked struct {
	board   *Board
	checker checker
	body    []byte // of the client
	handoff []byte // that prefill gave for it
}

func ask(t *testing.T, board *Board, prompt *Prompt, slot int) *asked {
	t.Helper()
	board.Assign(slot, &Plan{Prompt: prompt})
	a := &asked{board: board, checker: checker{board: board}, body: append([]byte(nil), prompt.body...)}
	serial := board.begin(slot)
	prompt.address(a.body, slot, serial)
	a.handoff = board.give(nil, slot, serial)
	return a
}

// prefill is the prefill leg of a proxy that does everything right.
func (a *asked) prefill(members map[string]any) {
	members["max_tokens"], members["stream"] = 1, false
	delete(members, "stream_options")
	members["kv_transfer_params"] = map[string]any{"do_remote_decode": true, "do_remote_prefill": false}
}

// decode is its decode leg.
func (a *asked) decode(members map[string]any) {
	members["kv_transfer_params"], _ = decode(a.handoff)
}

func (a *asked) checkPrefill(body []byte) error {
	_, err := a.checker.check(body, true)
	return err
}

func (a *asked) checkDecode(body []byte) error {
	l, err := a.checker.check(body, false)
	if err != nil {
		return err
	}
	_, err = a.board.take(l.handoff, l.slot, l.serial)
	return err
}

func TestByMeaningAnotherSpellingIsRight(t *testing.T) {
	for name, stream := range map[string]bool{"whole": false, "stream": true} {
		t.Run(name, func(t *testing.T) {
			a := ask(t, NewBoardByMeaning(), NewPrompt(2<<10, stream), 7)
			defaults := func(members map[string]any) {
				members["logprobs"], members["n"], members["min_tokens"] = false, 1, 1
			}
			p := rewrite(t, a.body, func(m map[string]any) { a.prefill(m); defaults(m) })
			d := rewrite(t, a.body, func(m map[string]any) { a.decode(m); defaults(m) })
			require.NotContains(t, string(d), `\u00e9`, "it is not spelled in another way")
			require.NotContains(t, string(d), string(a.handoff), "it is not spelled in another way")
			require.NoError(t, a.checkPrefill(p))
			require.NoError(t, a.checkDecode(d))
			assert.NotZero(t, a.board.slots[7].word.Load())
		})
	}
}

func TestByMeaningMembersInAnyOrderAreRight(t *testing.T) {
	a := ask(t, NewBoardByMeaning(), NewPrompt(2<<10, false), 0)
	members, err := scanObject(nil, a.body, nil)
	require.NoError(t, err)
	parts := []string{`"kv_transfer_params": ` + string(a.handoff)}
	for _, m := range members {
		parts = append([]string{`"` + string(m.name) + `" : ` + string(m.value)}, parts...)
	}
	require.NoError(t, a.checkDecode([]byte("{"+strings.Join(parts, " ,\n")+"}")))
}

func TestByMeaningTheSpellingOfLongPromptsIsLearntOnce(t *testing.T) {
	board, prompt := NewBoardByMeaning(), NewPrompt(64<<10, false)
	for range 2 {
		a := ask(t, board, prompt, 0)
		require.NoError(t, a.checkPrefill(rewrite(t, a.body, a.prefill)))
	}
	learnt := board.spellingOf(true).Load()
	a := ask(t, board, prompt, 0)
	leg := rewrite(t, a.body, a.prefill)
	require.NoError(t, a.checkPrefill(leg))
	assert.Same(t, learnt, board.spellingOf(true).Load())

	at := strings.Index(string(leg), "café")
	require.Positive(t, at)
	leg[at] ^= 1
	require.ErrorIs(t, a.checkPrefill(leg), errPrompt, "a changed letter after the spelling was learnt")

	other := NewPrompt(2<<10, false)
	a = ask(t, board, other, 0)
	require.NoError(t, a.checkPrefill(rewrite(t, a.body, a.prefill)), "the next load has another prompt")
}

func TestByMeaningWhatAProxyDoesWrongIsCaught(t *testing.T) {
	handoff := func(edit func(h map[string]any)) func(*asked, map[string]any) {
		return func(_ *asked, m map[string]any) {
			h, _ := m["kv_transfer_params"].(map[string]any)
			edit(h)
		}
	}
	set := func(name string, value any) func(*asked, map[string]any) {
		return func(_ *asked, m map[string]any) { m[name] = value }
	}
	drop := func(name string) func(*asked, map[string]any) {
		return func(_ *asked, m map[string]any) { delete(m, name) }
	}
	for name, c := range map[string]struct {
		prefill bool
		stream  bool
		edit    func(*asked, map[string]any)
		fault   string
	}{
		"prefill makes more than one token": {prefill: true, edit: set("max_tokens", 64), fault: "max_tokens is 64"},
		"prefill is streamed":               {prefill: true, edit: set("stream", true), fault: "stream is true"},
		"prefill is not asked for a handoff": {prefill: true, edit: drop("kv_transfer_params"),
			fault: "no kv_transfer"},
		"prefill keeps stream_options": {prefill: true, stream: true,
			edit: set("stream_options", map[string]any{"include_usage": true}), fault: "member stream_options"},
		"prefill makes two responses": {prefill: true, edit: set("n", 2), fault: "member n"},
		"prefill asks for two limits": {prefill: true, edit: set("max_completion_tokens", 64),
			fault: "max_completion_tokens is 64"},
		"a member of the client is dropped":  {edit: drop("temperature"), fault: "a member of the client is missing"},
		"the client's name is dropped":       {edit: drop("user"), fault: "a member of the client is missing"},
		"the messages are dropped":           {edit: drop("messages"), fault: "the prompt does not mean"},
		"a number of the client is changed":  {edit: set("temperature", 0.7), fault: "member temperature"},
		"a number is written as a string":    {edit: set("temperature", "0.5"), fault: "member temperature"},
		"decode makes fewer tokens":          {edit: set("max_tokens", 1), fault: "max_tokens is 1"},
		"a stream is not streamed":           {stream: true, edit: set("stream", false), fault: "stream is false"},
		"decode gets no handoff":             {edit: drop("kv_transfer_params"), fault: "no kv_transfer_params"},
		"decode gets a null for the handoff": {edit: set("kv_transfer_params", nil), fault: "lost its number"},
		"the handoff loses a key": {
			edit:  handoff(func(h map[string]any) { delete(h, "tp_size") }),
			fault: "does not mean what prefill gave"},
		"the handoff gets a key": {
			edit:  handoff(func(h map[string]any) { h["extra"] = 1 }),
			fault: "does not mean what prefill gave"},
		"the handoff's engine is another": {
			edit:  handoff(func(h map[string]any) { h["remote_engine_id"] = "another" }),
			fault: "does not mean what prefill gave"},
		"the handoff's block ids are flattened": {
			edit:  handoff(func(h map[string]any) { h["remote_block_ids"] = []any{1, 2} }),
			fault: "does not mean what prefill gave"},
		"the handoff's big integer goes through a float": {
			edit: handoff(func(h map[string]any) {
				n, _ := h["x_number"].(json.Number)
				f, _ := n.Float64()
				h["x_number"] = int64(f)
			}),
			fault: "never given"},
		"decode gets another request's handoff": {
			edit: func(a *asked, m map[string]any) {
				other := a.board.begin(1)
				m["kv_transfer_params"], _ = decode(a.board.give(nil, 1, other))
			},
			fault: "belongs to another request"},
		"decode gets the prompt of another request": {
			edit: func(_ *asked, m map[string]any) {
				list, _ := m["messages"].([]any)
				first, _ := list[0].(map[string]any)
				text, _ := first["content"].(string)
				first["content"] = "9" + text[1:]
			},
			fault: "the prompt does not mean"},
		"decode gets fewer messages": {
			edit: func(_ *asked, m map[string]any) {
				list, _ := m["messages"].([]any)
				m["messages"] = list[:len(list)-1]
			},
			fault: "the prompt does not mean"},
	} {
		t.Run(name, func(t *testing.T) {
			board, prompt := NewBoardByMeaning(), NewPrompt(2<<10, c.stream)
			board.lastHandoff.Store(1) // the next number is odd: no float64 holds it
			board.Assign(1, &Plan{Prompt: prompt})
			a := ask(t, board, prompt, 0)
			right, check := a.decode, a.checkDecode
			if c.prefill {
				right, check = a.prefill, a.checkPrefill
			}
			require.ErrorContains(t, check(rewrite(t, a.body, func(m map[string]any) { right(m); c.edit(a, m) })),
				c.fault)
			require.NoError(t, check(rewrite(t, a.body, right)), "the same leg without the fault")
		})
	}
}

func TestByMeaningAMemberMayNotComeTwice(t *testing.T) {
	a := ask(t, NewBoardByMeaning(), NewPrompt(2<<10, false), 0)
	leg := rewrite(t, a.body, a.decode)
	twice := strings.Replace(string(leg), `"model":"bench"`, `"model":"bench","model":"bench"`, 1)
	require.ErrorContains(t, a.checkDecode([]byte(twice)), "model comes twice")
	nested := strings.Replace(string(leg), `"tp_size":1`, `"pp_size":1`, 1)
	require.ErrorContains(t, a.checkDecode([]byte(nested)), "does not mean what prefill gave")
}

func TestByteForByteAnotherSpellingIsWrong(t *testing.T) {
	a := ask(t, NewBoard(), NewPrompt(2<<10, false), 0)
	require.ErrorContains(t, a.checkPrefill(rewrite(t, a.body, a.prefill)), "not byte for byte")
}

func TestValuesAreComparedByMeaning(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{`1.50`, `1.5`, true},
		{`15e-1`, `1.5`, true},
		{`-0`, `0`, true},
		{`9007199254740993`, `9007199254740992`, false},
		{`1`, `"1"`, false},
		{`1`, `true`, false},
		{`null`, `false`, false},
		{`"caf\u00e9 \/"`, `"café /"`, true},
		{`"a"`, `"b"`, false},
		{`[1,[2]]`, `[ 1.0, [2] ]`, true},
		{`[1,2]`, `[2,1]`, false},
		{`[1]`, `[1,1]`, false},
		{`{"a":1,"b":{}}`, `{"b":{},"a":1}`, true},
		{`{"a":1}`, `{"a":1,"b":null}`, false},
		{`{"a":null}`, `{"b":null}`, false},
		{`{}`, `[]`, false},
		{`{`, `{ `, false},
	} {
		assert.Equal(t, c.same, sameValue([]byte(c.a), []byte(c.b)), "%s and %s", c.a, c.b)
		assert.Equal(t, c.same, sameValue([]byte(c.b), []byte(c.a)), "%s and %s", c.b, c.a)
	}
}

func TestByMeaningAResponseMayBeSpelledInAnotherWay(t *testing.T) {
	said := appendWhole(nil, 7, 8)
	for name, c := range map[string]struct {
		old, with string
		same      bool
	}{
		"as it was said":          {"", "", true},
		"spaces":                  {`"model":"bench"`, `"model": "bench" `, true},
		"prefill's cached tokens": {`"cached_tokens":512`, `"cached_tokens":0`, true},
		"both":                    {`"cached_tokens":512`, `"cached_tokens": 0`, true},
		"other cached tokens":     {`"cached_tokens":512`, `"cached_tokens":511`, false},
		"another request's text":  {`0000000000000008`, `0000000000000009`, false},
		"a member is lost":        {`"metrics":null`, `"metric":null`, false},
		"it is cut":               {`}`, ``, false},
	} {
		got := strings.Replace(string(said), c.old, c.with, 1)
		assert.Equal(t, c.same, sameResponse([]byte(got), said), name)
	}
}

func TestByMeaningAStreamsEndMayHaveMoreUsage(t *testing.T) {
	const usage = `"completion_tokens":10`
	said := appendEnd(nil, 7, 8, 10)
	for name, c := range map[string]struct {
		old, with, fault string
	}{
		"as it was sent":              {"", "", ""},
		"spaces":                      {`"choices":[]`, `"choices": []`, ""},
		"the total":                   {usage, usage + `,"total_tokens":522`, ""},
		"another total":               {usage, usage + `,"total_tokens":523`, "does not mean"},
		"prefill's details":           {usage, usage + `,"prompt_tokens_details":{"cached_tokens":0}`, ""},
		"other details":               {usage, usage + `,"prompt_tokens_details":{"cached_tokens":1}`, "does not mean"},
		"other usage":                 {usage, `"completion_tokens":9`, "does not mean"},
		"another finish":              {`"finish_reason":"stop"`, `"finish_reason":"length"`, "does not mean"},
		"no [DONE]":                   {doneEvent, "", "without [DONE]"},
		"two [DONE]":                  {doneEvent, doneEvent + doneEvent, "not as many events"},
		"no usage":                    {string(said[strings.Index(string(said), "\n\n")+2:]), doneEvent, "not as many"},
		"an event that is not JSON":   {`"usage"`, `usage`, "does not mean"},
		"an event without its prefix": {`data: {"object"`, `{"object"`, "does not mean"},
	} {
		err := sameEnd([]byte(strings.Replace(string(said), c.old, c.with, 1)), said)
		if c.fault == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, c.fault, name)
		}
	}
}
