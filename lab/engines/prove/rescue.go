// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/lab/internal/apis"
)

// stream is one request whose stream is broken after each of its events.
type stream struct {
	name string
	path string
	body map[string]any
	find int // not 0: the stop string is what stands in the undisturbed text from here
}

const rescuedTokens = 24

func rescueStreams() []stream {
	const prompt = "Rivers begin as springs, and end as seas of words: "
	completion := func(more map[string]any) map[string]any {
		b := map[string]any{"model": "tiny", "prompt": prompt, "max_tokens": rescuedTokens, "temperature": 0,
			"stream": true}
		maps.Copy(b, more)
		return b
	}
	chat := func(more map[string]any) map[string]any {
		b := map[string]any{"model": "tiny", "messages": []map[string]string{{"role": "user", "content": prompt}},
			"max_completion_tokens": rescuedTokens, "temperature": 0, "stream": true}
		maps.Copy(b, more)
		return b
	}
	counted := map[string]any{"stream_options": map[string]any{"include_usage": true}}
	each := map[string]any{"stream_options": map[string]any{"include_usage": true, "continuous_usage_stats": true},
		"return_token_ids": true}
	// The tiny model makes ASCII only. With this bias it also makes a byte that begins a character of two, and so text
	// that the engine holds back, and bytes that are no text at all.
	bytesBias := map[string]any{"logit_bias": map[string]float64{"195": 6.5, "169": 6.3}, "max_tokens": 40}
	noLimit := chat(nil)
	delete(noLimit, "max_completion_tokens")
	noLimit["messages"] = []map[string]string{{"role": "user", "content": strings.Repeat(prompt, 20)[:955]}}
	const completions, chats = "/v1/completions", "/v1/chat/completions"
	return []stream{
		{"completions", completions, completion(nil), 0},
		{"completions, usage and ids", completions, completion(each), 0},
		{"completions, parts of characters", completions, completion(bytesBias), 0},
		{"completions, stop string that comes", completions, completion(nil), 12},
		{"completions, stop string that does not", completions, completion(map[string]any{"stop": []string{
			"never to be seen"}}), 0},
		{"chat", chats, chat(nil), 0},
		{"chat, usage", chats, chat(counted), 0},
		{"chat, usage and ids in each event", chats, chat(each), 0},
		{"chat, parts of characters", chats, chat(map[string]any{"logit_bias": bytesBias["logit_bias"],
			"max_completion_tokens": 40}), 0},
		{"chat, stop string that comes", chats, chat(counted), 9},
		{"chat, no limit of tokens", chats, noLimit, 0},
		{"chat, min_tokens and a stop token", chats, chat(map[string]any{"min_tokens": 10,
			"stop_token_ids": []int{36, 58, 62, 91}}), 0},
	}
}

// rescueTally is what came of one stream's breaks.
type rescueTally struct{ breaks, same, joined, cut, other int }

// proveRescue breaks streams of real engines: first, by a proxy, after each event; then by killing decode engines.
func proveRescue(ctx context.Context, lab *lab, out io.Writer) error {
	begin := time.Now()
	engines, err := lab.startEngines(ctx, engineOptions{role: "prefill"}, engineOptions{role: "decode"})
	if err != nil {
		return err
	}
	p, d := engines[0], engines[1]
	fmt.Fprintf(out, "prefill and decode engine ready after %.0f s\n\n", time.Since(begin).Seconds())
	next := &cut{}
	var urls []string
	for range 2 { // the same engine at two addresses: one breaks, the other goes on
		c, err := newCutter(d.url, next)
		if err != nil {
			return err
		}
		defer c.close()
		urls = append(urls, c.url)
	}
	gateway, err := lab.startGateway(ctx, gatewayOptions{connector: "nixl", prefills: []string{p.url}, decodes: urls,
		rescue: true})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "streams broken after each of their events, every second one within the next event:\n"+
		"%-40s %7s %10s %19s %4s %10s\n", "request", "breaks", "same bytes", "same, events joined", "cut", "other text")
	var result error
	for _, s := range rescueStreams() {
		t, err := breakEverywhere(ctx, s, gateway.url, d.url, next)
		fmt.Fprintf(out, "%-40s %7d %10d %19d %4d %10d\n", s.name, t.breaks, t.same, t.joined, t.cut, t.other)
		if err != nil {
			fmt.Fprintln(out, "  NOT OK:", err)
			result = errNotProven
		}
	}
	if err := stopGateway(gateway); err != nil {
		return err
	}
	if err := findTies(ctx, out, p.url); err != nil {
		return err
	}
	if err := killForReal(ctx, lab, out, p, d); err != nil {
		fmt.Fprintln(out, "  NOT OK:", err)
		result = errNotProven
	}
	return result
}

// breakEverywhere breaks a stream after each of its events, and compares what the client gets with what one engine
// alone answers.
func breakEverywhere(ctx context.Context, s stream, gateway, engine string, next *cut) (t rescueTally, err error) {
	body, want, err := s.reference(ctx, engine)
	if err != nil {
		return t, err
	}
	undisturbed, err := streamOf(ctx, gateway, s.path, body, nil)
	if err != nil || joined(undisturbed) != joined(want) {
		return t, fmt.Errorf("undisturbed, the gateway's stream is another than the engine's (%w):\n%s\n%s", err, want,
			undisturbed)
	}
	for k := 1; k < strings.Count(want, "\n\n"); k++ { // the last event is [DONE]
		var got string
		var broken error
		for range tries {
			next.arm(k, k%2 == 0)
			got, broken = streamOf(ctx, gateway, s.path, body, nil)
			if !next.happened() { // joined events: there were fewer
				next.take()
			} else if broken != nil || joined(got) != joined(want) || got == want {
				break
			}
		}
		t.breaks++
		switch {
		case broken != nil:
			t.cut++
			err = cmp.Or(err, fmt.Errorf("broken after event %d: %w\n%s\n%s", k, broken, want, got))
		case got == want:
			t.same++
		case joined(got) == joined(want):
			t.joined++
		default:
			t.other++
			err = cmp.Or(err, fmt.Errorf("broken after event %d:\n%s\n%s", k, want, got))
		}
	}
	return t, err
}

// tries is how often a stream is asked for until no two tokens came in one event: vLLM sends those together that are
// ready together.
const tries = 25

// reference asks one engine alone.
func (s stream) reference(ctx context.Context, engine string) (body []byte, want string, err error) {
	if body, err = json.Marshal(s.body); err != nil {
		return nil, "", err
	}
	for range tries { // the one with the most events has the fewest joined ones
		again, err := streamOf(ctx, engine, s.path, body, nil)
		if err != nil {
			return nil, "", err
		}
		if strings.Count(again, "\n\n") > strings.Count(want, "\n\n") {
			want = again
		}
	}
	if s.find == 0 {
		return body, want, nil
	}
	text := []rune(textOf(want))
	if len(text) < s.find+3 {
		return nil, "", fmt.Errorf("a text of %d characters is too short", len(text))
	}
	s.body["stop"] = []string{string(text[s.find : s.find+3]), "never to be seen"}
	s.find = 0
	return s.reference(ctx, engine)
}

// varying is what differs between two runs: when they began, and what the engine had in its cache.
var varying = regexp.MustCompile(`"created":\d+|,"prompt_tokens_details":\{[^}]*\}`)

// running counts the requests that an engine works on.
var running = sample{"vllm:num_requests_running", ""}

// streamOf returns a stream without what differs between two runs. onEvent, if not nil, gets the number of each event.
func streamOf(ctx context.Context, base, path string, body []byte, onEvent func(events int)) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	got, err := post(ctx, base+path, json.RawMessage(body), "X-Request-Id", "the-same-id")
	if err != nil {
		return "", err
	}
	defer got.Body.Close()
	var content []byte
	lines := bufio.NewReader(got.Body)
	for events := 0; err == nil; {
		var line []byte
		line, err = lines.ReadBytes('\n')
		content = append(content, line...)
		if len(line) == 1 && onEvent != nil {
			events++
			onEvent(events)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	text := varying.ReplaceAllStringFunc(string(content), func(s string) string {
		if strings.HasPrefix(s, ",") {
			return ""
		}
		return `"created":0`
	})
	if err == nil && got.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d", got.StatusCode)
	}
	return text, err
}

// joined is a stream in which it does not matter how many tokens came with one event: engines join those that are made
// before the event before them is sent.
func joined(body string) string {
	var ids []string
	shapes := map[string]bool{}
	for event := range strings.SplitSeq(body, "\n\n") {
		data, _ := strings.CutPrefix(event, "data: ")
		for _, id := range gjson.Get(data, "choices.0.token_ids").Array() {
			ids = append(ids, id.Raw)
		}
		ended := gjson.Get(data, "choices.0.finish_reason").Type == gjson.String
		for _, path := range []string{"choices.0.text", "choices.0.delta.content", "choices.0.token_ids", "usage"} {
			if v := gjson.Get(data, path); v.Exists() && (path != "usage" || gjson.Get(data, "choices.0").Exists()) {
				data = data[:v.Index] + "*" + data[v.Index+len(v.Raw):]
			}
		}
		shapes[fmt.Sprint(data, ended)] = true
	}
	return textOf(body) + "\n" + strings.Join(ids, ",") + "\n" + strings.Join(slices.Sorted(maps.Keys(shapes)), "\n")
}

func textOf(body string) string {
	var b strings.Builder
	for event := range strings.SplitSeq(body, "\n\n") {
		data, _ := strings.CutPrefix(event, "data: ")
		b.WriteString(gjson.Get(data, "choices.0.text").Str + gjson.Get(data, "choices.0.delta.content").Str)
	}
	return b.String()
}

// findTies asks one engine for each token of greedy responses again, with all tokens before it as the prompt. Where
// prefill chooses otherwise than decode did, a rescued stream may go on with another text.
func findTies(ctx context.Context, out io.Writer, engine string) error {
	const responses, length = 8, 64
	places, found := 0, 0
	for n := range responses {
		ids, err := tokensAfter(ctx, engine, newQuestion(apis.Completions, false, 40+30*n, 1).prompt, length)
		if err != nil {
			return err
		}
		prompt, output := ids[:len(ids)-length], ids[len(ids)-length:]
		for k := 1; k < length; k++ {
			again, err := tokensAfter(ctx, engine, ids[:len(prompt)+k], 1)
			if err != nil {
				return err
			}
			places++
			if got := again[len(again)-1]; got != output[k] {
				found++
				fmt.Fprintf(out, "  a tie: prompt of %d tokens, output token %d: decode chose %d, prefill %d\n",
					len(prompt), k, output[k], got)
			}
		}
	}
	fmt.Fprintf(out, "\nties: at %d of %d places of %d greedy responses prefill chooses another token\n", found,
		places, responses)
	return nil
}

// tokensAfter returns the ids of a prompt and of its completion, computed without any cache.
func tokensAfter(ctx context.Context, engine string, prompt any, tokens int) ([]int64, error) {
	body, err := json.Marshal(map[string]any{"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
		"return_token_ids": true, "cache_salt": rand.Text()})
	if err != nil {
		return nil, err
	}
	got, err := streamOf(ctx, engine, "/v1/completions", body, nil)
	if err != nil {
		return nil, err
	}
	var ids []int64
	for _, path := range []string{"choices.0.prompt_token_ids", "choices.0.token_ids"} {
		for _, id := range gjson.Get(got, path).Array() {
			ids = append(ids, id.Int())
		}
	}
	if len(ids) <= tokens {
		return nil, errors.New("the engine tells no token ids")
	}
	return ids, nil
}

// killForReal kills decode engines while they stream; another one goes on.
func killForReal(ctx context.Context, lab *lab, out io.Writer, p, d *process) error {
	const kills = 4
	fmt.Fprintf(out, "\ndecode engines killed while they stream, %d times:\n", kills)
	for n := range kills {
		engines, err := lab.startEngines(ctx, engineOptions{role: "decode"})
		if err != nil {
			return err
		}
		pair := []*process{d, engines[0]}
		gateway, err := lab.startGateway(ctx, gatewayOptions{connector: "nixl", prefills: []string{p.url},
			decodes: []string{pair[0].url, pair[1].url}, rescue: true})
		if err != nil {
			return err
		}
		s := rescueStreams()[[]int{6, 1}[n%2]] // with counts
		s.body["max_tokens"], s.body["max_completion_tokens"] = 700, 700
		if n%2 == 1 {
			delete(s.body, "max_completion_tokens")
		}
		killed, got, want, err := killOnce(ctx, s, gateway.url, p.url, pair, 20+30*n)
		if err != nil {
			return err
		}
		switch {
		case got == want:
			fmt.Fprintf(out, "  %s, killed after %d events: same bytes\n", s.name, 20+30*n)
		case joined(got) == joined(want):
			fmt.Fprintf(out, "  %s, killed after %d events: same, events joined\n", s.name, 20+30*n)
		default:
			return fmt.Errorf("%s: other bytes after a kill:\n%s\n%s", s.name, want, got)
		}
		if err := stopGateway(gateway); err != nil {
			return err
		}
		d = pair[1-killed]
	}
	return nil
}

// killOnce kills the decode engine that streams, when so many events of the stream have come.
func killOnce(ctx context.Context, s stream, gateway, alone string, pair []*process, after int) (killed int, got,
	want string, err error) {
	body, want, err := s.reference(ctx, alone)
	if err != nil {
		return 0, "", "", err
	}
	killed = -1
	var killErr error
	got, err = streamOf(ctx, gateway, s.path, body, func(events int) {
		if events < after || killed >= 0 {
			return
		}
		for i, d := range pair {
			if m, err := readMetrics(ctx, d.url); err == nil && m.sum(running) > 0 {
				killed, killErr = i, d.Kill()
				return
			}
		}
	})
	if killed < 0 {
		return 0, got, want, fmt.Errorf("the stream ended before the kill: %w", err)
	}
	return killed, got, want, errors.Join(err, killErr)
}
