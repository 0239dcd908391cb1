// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"sync/atomic"
)

// A proxy that decodes a request and writes it anew sends the same JSON in another spelling. To decode each leg would
// cost the engines more than most proxies need for a request: 1 MB takes about 10 ms. So messages are decoded once per
// spelling. Later legs are compared with that spelling, byte for byte but for the serial numbers.

// spellingOf returns the place of the spelling that legs of one role used last.
func (b *Board) spellingOf(prefill bool) *atomic.Pointer[spelling] {
	if prefill {
		return &b.prefillSpelling
	}
	return &b.decodeSpelling
}

var errPrompt = errors.New("the prompt does not mean what the client sent")

// learn decodes the messages of a leg, compares them with the prompt, and keeps their spelling for the next leg.
func (c *checker) learn(prompt *Prompt, prefill bool) (serial uint64, err error) {
	var value []byte
	for _, m := range c.members {
		if string(m.name) == "messages" {
			value = m.value
		}
	}
	var first []struct{ Content string }
	if json.Unmarshal(value, &first) != nil || len(first) == 0 || len(first[0].Content) < serialDigits {
		return 0, errPrompt
	}
	text := []byte(first[0].Content[:serialDigits])
	serial, ok := digits(text)
	if !ok {
		return 0, errPrompt
	}
	body := bytes.Clone(prompt.body)
	prompt.stamp(body, serial)
	if !sameValue(body[prompt.msgAt:][:len(prompt.messages)], value) {
		return 0, errPrompt
	}
	// Both serial numbers are plain digits inside strings: with others in their places, the rest means the same.
	if bytes.Count(value, text) == 2 {
		c.board.spellingOf(prefill).Store(&spelling{
			prompt:   prompt,
			messages: bytes.Clone(value),
			serialAt: [2]int{bytes.Index(value, text), bytes.LastIndex(value, text)},
		})
	}
	return serial, nil
}

// same compares a member with the client's.
func (c *checker) same(value []byte, want string) bool {
	return string(value) == want || c.board.byMeaning && sameValue(value, []byte(want))
}

// prefillCached is what a whole response says of the prefix cache if the proxy reports prefill's figure. For decode all
// tokens that it fetched are cached ones, which is of no use to a client, so vllm-router 0.1.17 does that.
var prefillCached, decodeCached = []byte(`"cached_tokens":0`), []byte(`"cached_tokens":512`)

// sameResponse compares a whole response with the decode engine's. Its cached tokens may be prefill's.
func sameResponse(got, want []byte) bool {
	other := bytes.Replace(want, decodeCached, prefillCached, 1)
	return bytes.Equal(got, other) || sameValue(got, want) || sameValue(got, other)
}

// sameEnd compares what follows a stream's last chunk with what the decode engine sent.
func sameEnd(got, want []byte) error {
	theirs, ours := bytes.SplitAfter(got, []byte("\n\n")), bytes.SplitAfter(want, []byte("\n\n"))
	if !bytes.HasSuffix(got, []byte(doneEvent)) {
		return errors.New("the stream ended without [DONE]")
	}
	if len(theirs) != len(ours) {
		return errors.New("the stream's end has not as many events as the engine sent")
	}
	for i := range ours {
		if bytes.Equal(theirs[i], ours[i]) {
			continue
		}
		data, ok := bytes.CutPrefix(theirs[i], []byte("data: "))
		if !ok || !sameUsageEvent(data, bytes.TrimPrefix(ours[i], []byte("data: "))) {
			return errors.New("the stream's end does not mean what the engine sent")
		}
	}
	return nil
}

// sameUsageEvent compares an event at a stream's end with the engine's. Its usage may have the total, and the details
// that prefill gave, as vllm-router 0.1.17 adds them.
func sameUsageEvent(got, want []byte) bool {
	theirs, err := decode(got)
	if err != nil {
		return false
	}
	ours, err := decode(want)
	if err != nil {
		return false
	}
	event, _ := theirs.(map[string]any)
	usage, _ := event["usage"].(map[string]any)
	sum := sumOf(usage["prompt_tokens"], usage["completion_tokens"])
	if total, ok := usage["total_tokens"]; ok && same(total, sum) {
		delete(usage, "total_tokens")
	}
	details, _ := usage["prompt_tokens_details"].(map[string]any)
	if same(details["cached_tokens"], json.Number("0")) { // what prefill said
		delete(usage, "prompt_tokens_details")
	}
	return same(theirs, ours)
}

// sumOf adds two integers; nil if they are none.
func sumOf(a, b any) any {
	x, _ := a.(json.Number)
	y, _ := b.(json.Number)
	n, err := x.Int64()
	m, errs := y.Int64()
	if err != nil || errs != nil {
		return nil
	}
	return json.Number(strconv.FormatInt(n+m, 10))
}

// harmless reports whether a member that the client did not send leaves the number and the form of responses as they
// are.
func harmless(m member) bool {
	switch string(m.name) {
	case "n", "best_of":
		return string(m.value) == "1" || string(m.value) == "null"
	case "stream_options":
		return string(m.value) == "null"
	}
	return true
}

// sameObject compares two JSON objects by meaning. Members that have the same bytes are not decoded: a handoff is
// nearly all block ids, which nobody spells in another way.
func sameObject(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	mine, err := scanObject(nil, a, nil)
	if err != nil {
		return false
	}
	theirs, err := scanObject(nil, b, nil)
	if err != nil || len(mine) != len(theirs) {
		return false
	}
	for _, m := range mine {
		value, ok := valueOf(theirs, m.name)
		if !ok || !sameValue(m.value, value) {
			return false
		}
	}
	return true
}

func valueOf(members []member, name []byte) ([]byte, bool) {
	for _, m := range members {
		if bytes.Equal(m.name, name) {
			return m.value, true
		}
	}
	return nil, false
}

// sameValue compares two JSON values by meaning.
func sameValue(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	mine, err := decode(a)
	if err != nil {
		return false
	}
	theirs, err := decode(b)
	return err == nil && same(mine, theirs)
}

func decode(text []byte) (value any, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber() // a float64 would make 2^53+1 and 2^53 the same
	err = d.Decode(&value)
	return value, err
}

func same(a, b any) bool {
	switch a := a.(type) {
	case map[string]any:
		b, ok := b.(map[string]any)
		return ok && maps.EqualFunc(a, b, same)
	case []any:
		b, ok := b.([]any)
		return ok && slices.EqualFunc(a, b, same)
	case json.Number:
		b, ok := b.(json.Number)
		return ok && sameNumber(a.String(), b.String())
	}
	return a == b
}

func sameNumber(a, b string) bool {
	x, ok := new(big.Rat).SetString(a)
	y, okay := new(big.Rat).SetString(b)
	return ok && okay && x.Cmp(y) == 0
}

// handoffNumberAnywhere reads the number that makes a handoff unique, wherever in the handoff it is.
func handoffNumberAnywhere(handoff []byte) (uint64, bool) {
	members, err := scanObject(nil, handoff, nil)
	if err != nil {
		return 0, false
	}
	value, ok := valueOf(members, []byte("x_number"))
	if !ok {
		return 0, false
	}
	return digits(value)
}
