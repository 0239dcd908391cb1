// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

// check is one claim that must be true if D reused what P computed.
type check struct {
	claim string // what must be true
	seen  string // what was seen
	where string // where it was read
	ok    bool
}

// prove reads the engines' own counters, which the gateway cannot change, and sends the same requests to one engine
// alone.
func prove(ctx context.Context, lab *lab, responses []response) ([]check, error) {
	idle, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := errors.Join(lab.prefill.WaitIdle(idle), lab.decode.WaitIdle(idle)); err != nil {
		return nil, fmt.Errorf("the engines are not done: %w", err)
	}
	page, err := metrics(ctx, lab.decode.URL())
	if err != nil {
		return nil, err
	}
	same, err := askAlone(ctx, lab.alone.URL(), responses)
	if err != nil {
		return nil, err
	}
	sent := 0
	for _, a := range responses {
		sent += a.prompt
	}
	taken := metric(page, "vllm:prompt_tokens_by_source_total", `source="external_kv_transfer"`)
	computed := metric(page, "vllm:prompt_tokens_by_source_total", `source="local_compute"`)
	moved := metric(page, "vllm:nixl_bytes_transferred_sum")
	kv := errors.Join(lab.prefill.CheckKV(), lab.decode.CheckKV())
	return []check{
		{"D took the prompts over from P", fmt.Sprintf("%d of %d tokens", taken, sent),
			`D's vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}`, sent > 0 && taken == sent},
		{"D read no prompt itself", fmt.Sprintf("%d tokens", computed),
			`D's vllm:prompt_tokens_by_source_total{source="local_compute"}`, computed == 0},
		{"The KV moved from P to D", kilobytes(moved), "D's vllm:nixl_bytes_transferred_sum",
			moved >= sent*engine.BytesPerToken && sent > 0},
		{"Each handoff was used exactly once", breaches(kv), "the engines' own accounts: CheckKV of P and of D",
			kv == nil},
		{"One engine alone gives the same text", fmt.Sprintf("%d of %d responses", same, len(responses)),
			"the same four requests, sent to S", same == len(responses)},
	}, nil
}

// verdict returns nil if all checks are true.
func verdict(checks []check) error {
	var wrong []string
	for _, c := range checks {
		if !c.ok {
			wrong = append(wrong, c.claim)
		}
	}
	if wrong == nil {
		return nil
	}
	return errors.New("this did not hold:\n" + strings.Join(wrong, "\n"))
}

// askAlone sends all requests to one engine at once, and counts the responses with the same text.
func askAlone(ctx context.Context, url string, responses []response) (same int, err error) {
	lone, errs := make([]response, len(responses)), make([]error, len(responses))
	var wg sync.WaitGroup
	for i := range responses {
		wg.Go(func() { lone[i], errs[i] = ask(ctx, url, requests[i], func(string) {}) })
	}
	wg.Wait()
	for i, a := range responses {
		if a.text != "" && lone[i].text == a.text {
			same++
		}
	}
	return same, errors.Join(errs...)
}

// metrics reads an engine's page in Prometheus' text format.
func metrics(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	return string(page), err
}

// metric is the sum of the samples of one name that have all the labels.
func metric(page, name string, labels ...string) (sum int) {
next:
	for line := range strings.Lines(page) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		if !strings.HasPrefix(series, name+"{") {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(series, l) {
				continue next
			}
		}
		v, _ := strconv.ParseFloat(value, 64)
		sum += int(v)
	}
	return sum
}

// breaches sums up what CheckKV found, which joins its errors.
func breaches(err error) string {
	if err == nil {
		return "no breach"
	}
	first := err.Error()
	if fault := (*enginesim.KVFault)(nil); errors.As(err, &fault) {
		first = string(fault.Kind)
	}
	return fmt.Sprintf("%d of: %s", strings.Count(err.Error(), "\n")+1, first)
}

func kilobytes(n int) string { return fmt.Sprintf("%.1f kB", float64(n)/1000) }
