// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/lab/internal/paced"
)

// fit measures a prefill and a decode engine, which do nothing else meanwhile, and makes the fleet that their steps and
// the link between them show. What engines do not tell, the bounds of a step, is in limits.
func fit(ctx context.Context, out io.Writer, urls []string, name string, limits model.Spec, times int) (*fleet, error) {
	f := &fleet{paced.Fleet{Prefill: 1, URLs: urls}}
	if len(urls) != 2 {
		return nil, errors.New("one prefill and one decode engine are needed")
	}
	fmt.Fprint(out, "| engine | a step | a request | 1,000 tokens of context | a token of prompt | 1,000 pairs of "+
		"attention | HTTP | off, median | off, most |\n|---|---|---|---|---|---|---|---|---|\n")
	// Both at the same time, since they share a machine when they serve, too.
	shown, probes, errs := make([]*measured, 2), make([]*probe, 2), make([]error, 2)
	var wg sync.WaitGroup
	for i, url := range urls {
		s := limits
		var err error
		if s.Blocks, s.BlockSize, err = blocks(ctx, url); err != nil {
			return nil, err
		}
		f.Specs, probes[i] = append(f.Specs, s), &probe{url: url, model: name}
		wg.Go(func() { shown[i], errs[i] = probes[i].measure(ctx, times) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	for i, m := range shown {
		fmt.Fprintln(out, m.row([]string{"prefill", "decode"}[i]))
		f.Specs[i].StepTime, f.Specs[i].BytesPerToken = m.time, 1
	}
	var err error
	if f.Link, err = f.fitLink(ctx, probes[0], shown[0], shown[1], times); err != nil {
		return nil, err
	}
	kv := 0.0
	if f.Link.BytesPerSecond > 0 {
		kv = 1e6 / f.Link.BytesPerSecond
	}
	fmt.Fprintf(out, "\nBetween them: %.3g ms, and %.3g ms for 1,000 tokens of KV\n\n", 1e3*f.Link.Latency, kv)
	return f, nil
}

// row shows what was fitted, and by how much the steps that it was fitted to are off.
func (m *measured) row(engine string) string {
	t := m.time
	var off []float64
	for _, o := range m.steps {
		off = append(off, math.Abs(t.Seconds(o.Load)/o.Seconds-1))
	}
	var row strings.Builder
	row.WriteString("| " + engine)
	for _, ms := range []float64{1e3 * t.Base, 1e3 * t.PerRequest, 1e6 * t.PerContextToken, 1e3 * t.PerPrefillToken,
		1e6 * t.PerAttention, 1e3 * m.overhead} {
		fmt.Fprintf(&row, " | %.3g ms", ms)
	}
	fmt.Fprintf(&row, " | %.1f %% | %.1f %% |", 100*quantile(off, .5), 100*slices.Max(off))
	return row.String()
}

var (
	numBlocks = regexp.MustCompile(`vllm:cache_config_info\{(?:.*,)?num_gpu_blocks="(\d+)"`)
	blockSize = regexp.MustCompile(`vllm:cache_config_info\{(?:.*,)?block_size="(\d+)"`)
)

// blocks asks an engine for the shape of its memory.
func blocks(ctx context.Context, url string) (n, size int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(url, "/")+"/metrics", http.NoBody)
	if err != nil {
		return 0, 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, 0, errors.New("an engine does not answer")
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(io.LimitReader(resp.Body, 1<<22))
	number := func(pattern *regexp.Regexp) (n int) {
		if found := pattern.FindSubmatch(page); found != nil {
			n, _ = strconv.Atoi(string(found[1]))
		}
		return n
	}
	if n, size = number(numBlocks), number(blockSize); err == nil && (n < 1 || size < 1) {
		err = errors.New("an engine's metrics do not tell its blocks")
	}
	return n, size, err
}
