// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"sync"
	"time"
)

// totals are the counters and gauges of an engine that others may see. The exported type Stats has the same fields.
type totals struct {
	Requests            int64
	Finished            int64
	Aborted             int64
	Errors              int64
	PromptTokens        int64
	LocalCompute        int64
	LocalCacheHit       int64
	ExternalKVTransfer  int64
	GenerationTokens    int64
	Transfers           int64
	BytesTransferred    int64
	FailedTransfers     int64
	FailedNotifications int64
	Expired             int64
	AfterExpiry         int64
	Preemptions         int64
	Orphans             int64
	MediaEncoded        int64
	MediaLoaded         int64
	MediaComputed       int64
	Running, Waiting    int
	UsedBlocks          int
	PinnedBlocks        int
}

// counters is what an engine counts, for its totals and for /metrics alike.
type counters struct {
	mu sync.Mutex
	totals
	prefixQueries, prefixHits                int64
	externalQueries, externalHits            int64
	cachedTokens, cachedDevice, cachedP2P    int64
	successStop, successLength, successAbort int64
	loading                                  int64 // requests that wait for KV
	alone                                    bool  // the engine has no connector
	histograms                               map[string]*histogram
}

func newCounters(alone bool) *counters { return &counters{alone: alone, histograms: newHistograms()} }

func (c *counters) add(field *int64, n int64) {
	c.mu.Lock()
	*field += n
	c.mu.Unlock()
}

// transferred notes one read from another engine.
func (c *counters) transferred(bytes, blocks int, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Transfers++
	c.BytesTransferred += int64(bytes)
	c.observe("nixl_bytes_transferred", float64(bytes))
	c.observe("nixl_num_descriptors", float64(blocks))
	c.observe("nixl_xfer_time_seconds", took.Seconds())
	c.observe("nixl_post_time_seconds", took.Seconds()/16)
}

// loadFailed notes a read that failed.
func (c *counters) loadFailed(e *loadError) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.FailedTransfers += e.failures
	c.FailedNotifications += e.notifications
}

// scheduled notes what a request found when it got its blocks. The promise of
// another engine or store, of the tokens up to promised, counts as a hit here,
// whether it is kept or not.
func (c *counters) scheduled(s *sequence, external bool, promised int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !s.noCache {
		c.prefixQueries += int64(s.prompt)
		c.prefixHits += int64(s.cached)
	}
	rest := int64(s.prompt - s.cached)
	if !c.alone { // without a connector nobody is asked
		c.externalQueries += rest
	}
	c.cachedDevice += int64(s.cached)
	if external {
		c.externalHits += int64(promised - s.cached)
		c.cachedP2P += int64(promised - s.cached)
	}
}

// prefilled notes where a prompt's KV really came from: up to promised from
// elsewhere, if external.
func (c *counters) prefilled(s *sequence, external bool, promised int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if external && s.prompt == 1 {
		// The last token of a prompt is computed here in any case, to sample from
		// it. With a prompt of one token nothing is left of the transfer, and the
		// request is scheduled again as if it were new (capture 13).
		external = false
		c.prefixQueries++
		c.externalQueries++
	}
	rest := int64(s.prompt - s.cached)
	c.PromptTokens += int64(s.prompt)
	c.LocalCacheHit += int64(s.cached)
	c.cachedTokens += int64(s.cached)
	if external {
		loaded := int64(promised - s.cached)
		c.ExternalKVTransfer += loaded
		c.cachedTokens += loaded
		c.LocalCompute += rest - loaded
	} else {
		c.LocalCompute += rest
	}
}

// timing is how long the phases of a request took.
type timing struct {
	queued, prefill, decode, first, whole time.Duration
}

// ended notes a request that ran to its end.
func (c *counters) ended(r *running, reason string) {
	s, g, tokens, t := r.s, r.g, len(r.out.tokens), r.times()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch reason {
	case reasonStop:
		c.successStop++
		c.Finished++
	case reasonLength:
		c.successLength++
		c.Finished++
	case reasonAbort:
		c.successAbort++
		c.Aborted++
	case reasonError:
		c.Errors++
	}
	c.observe("request_prompt_tokens", float64(s.prompt))
	c.observe("request_generation_tokens", float64(tokens))
	c.observe("request_max_num_generation_tokens", float64(tokens))
	c.observe("request_params_max_tokens", float64(g.maxTokens))
	c.observe("request_params_n", float64(g.children))
	c.observe("request_prefill_kv_computed_tokens", float64(s.prompt-r.out.cached))
	c.observe("request_num_preemptions", 0)
	c.observe("time_to_first_token_seconds", t.first.Seconds())
	c.observe("e2e_request_latency_seconds", t.whole.Seconds())
	c.observe("request_queue_time_seconds", t.queued.Seconds())
	c.observe("request_prefill_time_seconds", t.prefill.Seconds())
	c.observe("request_decode_time_seconds", t.decode.Seconds())
	c.observe("request_inference_time_seconds", (t.prefill + t.decode).Seconds())
	if tokens > 1 {
		each := t.decode.Seconds() / float64(tokens-1)
		c.observe("request_time_per_output_token_seconds", each)
	}
}

// observe adds a value. The caller holds the lock.
func (c *counters) observe(name string, value float64) {
	h := c.histograms[name]
	i := 0
	for i < len(h.bounds) && value > h.bounds[i] {
		i++
	}
	h.counts[i]++
	h.count++
	h.sum += value
}
