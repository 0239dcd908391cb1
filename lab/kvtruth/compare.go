// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/lab/internal/gateway"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// The conversations that policies are compared by: many more tokens than the engines hold at the end.
const (
	conversations = 16
	turns         = 6
	systems       = 3
	systemLength  = 192 // characters, which are tokens
	askLength     = 100
	answerLength  = 24
)

// compare sends the same conversations through a gateway in front of some engines, once with each policy, and prints
// how many tokens of the prompts were cached.
func (r *run) compare(ctx context.Context, engines int) error {
	dir, err := os.MkdirTemp("", "kvtruth")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	binary, err := proc.Build(ctx, dir, proc.Gateway)
	if err != nil {
		return err
	}
	var urls []string
	for range engines {
		e, err := startVLLM(dir, 4<<10, 10_000)
		if err != nil {
			return err
		}
		defer e.Close()
		urls = append(urls, e.URL())
	}
	fmt.Println("| policy | requests | prompt tokens | cached | share |\n|---|---|---|---|---|")
	for _, policy := range []string{"round-robin", "prefix", "kv"} {
		for _, url := range urls {
			if err := reset(ctx, url); err != nil {
				return err
			}
		}
		found, err := r.through(ctx, dir, binary, policy, urls)
		if err != nil {
			return fmt.Errorf("%s: %w", policy, err)
		}
		fmt.Printf("| `%s` | %d | %d | %d | %.1f %% |\n", policy, found.Requests, found.Prompt, found.Cached,
			100*float64(found.Cached)/float64(found.Prompt))
	}
	return nil
}

// through runs a gateway and sends it the conversations.
func (r *run) through(ctx context.Context, dir, binary, policy string, urls []string) (*result, error) {
	var addresses []string
	for range 2 {
		port, err := freeport.One()
		if err != nil {
			return nil, err
		}
		addresses = append(addresses, "127.0.0.1:"+port)
	}
	var endpoints []gateway.Object
	for _, url := range urls {
		endpoints = append(endpoints, gateway.Object{"url": url, "role": "both"})
	}
	config, err := gateway.Config(addresses[0], addresses[1], gateway.Object{"model": r.model,
		"kvConnector": gateway.Object{"type": "http"}, "decision": gateway.Object{"mode": "never"},
		"kvEvents":  gateway.Object{"mode": "ask", "tokens": "engines", "tokensTimeout": "10s"},
		"discovery": gateway.Static(nil, nil, endpoints...)})
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, policy+".yaml")
	if err := os.WriteFile(file, config, 0o600); err != nil {
		return nil, err
	}
	cmd := exec.Command(binary, "-config", file, "-pick", policy) //nolint:gosec,noctx // stopped below
	g, err := proc.Start(cmd, "gateway", filepath.Join(dir, policy+".log"), (*exec.Cmd).Start)
	if err != nil {
		return nil, err
	}
	defer g.Stop(10 * time.Second)
	waiting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = g.Until(waiting, 50*time.Millisecond, func() bool {
		return strings.Count(page(waiting, "http://"+addresses[1]+"/debug/pd"), `"exact"`) >= len(urls)
	})
	if err != nil {
		return nil, err
	}
	return r.converse(ctx, "http://"+addresses[0])
}

func page(ctx context.Context, url string) string {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return ""
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return ""
	}
	return string(body)
}

// converse sends conversations, whose turns come in a random order, one after the other.
func (r *run) converse(ctx context.Context, url string) (*result, error) {
	p := r.prompts()
	var texts [conversations]string
	var first [systems]string
	for i := range first {
		first[i] = p.fresh("", systemLength)
	}
	for i := range texts {
		texts[i] = first[p.random.IntN(systems)]
	}
	var order []int
	for range turns {
		order = append(order, p.random.Perm(conversations)...)
	}
	found := &result{}
	for _, i := range order {
		text := p.fresh(texts[i], len(texts[i])+askLength)
		body, err := json.Marshal(map[string]any{"model": r.model, "prompt": text, "max_tokens": answerLength,
			"temperature": 0})
		if err != nil {
			return nil, err
		}
		a, err := complete(ctx, url, body)
		if err != nil {
			return nil, err
		}
		if len(a.Choices) != 1 {
			return nil, errors.New("a response without its text")
		}
		texts[i] = text + a.Choices[0].Text
		found.Requests++
		found.Prompt += a.Usage.Prompt
		found.Cached += a.Usage.Details.Cached
		if err := proc.Pause(ctx, settled); err != nil { // what a user thinks for
			return nil, err
		}
	}
	return found, nil
}
