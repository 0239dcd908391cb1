// SPDX-License-Identifier: Apache-2.0

package core

import (
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/metrics"
)

// Totals are the counters and gauges of an engine that others may see. The exported type Stats has the same fields.
type Totals struct {
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

// Counters is what an engine counts, for its totals and for /metrics alike.
type Counters struct {
	mu sync.Mutex
	Totals
	prefixQueries, prefixHits                int64
	externalQueries, externalHits            int64
	cachedTokens, cachedDevice, cachedP2P    int64
	successStop, successLength, successAbort int64
	loading                                  int64 // requests that wait for KV
	alone                                    bool  // the engine has no connector
	histograms                               metrics.Histograms
}

func newCounters(alone bool) *Counters {
	return &Counters{alone: alone, histograms: metrics.NewHistograms()}
}

// Add adds to one of the counters.
func (c *Counters) Add(field *int64, n int64) {
	c.mu.Lock()
	*field += n
	c.mu.Unlock()
}

// Transferred notes one read from another engine.
func (c *Counters) Transferred(bytes, blocks int, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Transfers++
	c.BytesTransferred += int64(bytes)
	c.histograms.Observe("nixl_bytes_transferred", float64(bytes))
	c.histograms.Observe("nixl_num_descriptors", float64(blocks))
	c.histograms.Observe("nixl_xfer_time_seconds", took.Seconds())
	c.histograms.Observe("nixl_post_time_seconds", took.Seconds()/16)
}

// loadFailed notes a read that failed.
func (c *Counters) loadFailed(e *LoadError) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.FailedTransfers += e.Failures
	c.FailedNotifications += e.Notifications
}

// scheduled notes what a request found when it got its blocks. The tokens up to promised, which another engine or a
// store has promised, count as hits here, even if the load fails later.
func (c *Counters) scheduled(s *Sequence, external bool, promised int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !s.noCache {
		c.prefixQueries += int64(s.Prompt)
		c.prefixHits += int64(s.Cached)
	}
	rest := int64(s.Prompt - s.Cached)
	if !c.alone { // without a connector nobody is asked
		c.externalQueries += rest
	}
	c.cachedDevice += int64(s.Cached)
	if external {
		c.externalHits += int64(promised - s.Cached)
		c.cachedP2P += int64(promised - s.Cached)
	}
}

// prefilled notes where a prompt's KV really came from. If external is true, the tokens up to promised came from
// elsewhere.
func (c *Counters) prefilled(s *Sequence, external bool, promised int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if external && s.Prompt == 1 {
		// The last token of a prompt is computed here in any case, to sample from it. With a prompt of one token
		// nothing is left of the transfer, and the request is scheduled again as if it were new
		// (docs/protocols/nixl.md, recording 13).
		external = false
		c.prefixQueries++
		c.externalQueries++
	}
	rest := int64(s.Prompt - s.Cached)
	c.PromptTokens += int64(s.Prompt)
	c.LocalCacheHit += int64(s.Cached)
	c.cachedTokens += int64(s.Cached)
	if external {
		loaded := int64(promised - s.Cached)
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
func (c *Counters) ended(r *running, reason string) {
	s, g, tokens, t := r.s, r.g, len(r.out.Tokens), r.times()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch reason {
	case ReasonStop:
		c.successStop++
		c.Finished++
	case ReasonLength:
		c.successLength++
		c.Finished++
	case reasonAbort:
		c.successAbort++
		c.Aborted++
	default:
		c.Errors++
	}
	c.histograms.Observe("request_prompt_tokens", float64(s.Prompt))
	c.histograms.Observe("request_generation_tokens", float64(tokens))
	c.histograms.Observe("request_max_num_generation_tokens", float64(tokens))
	c.histograms.Observe("request_params_max_tokens", float64(g.MaxTokens))
	c.histograms.Observe("request_params_n", float64(g.Children))
	c.histograms.Observe("request_prefill_kv_computed_tokens", float64(s.Prompt-r.out.Cached))
	c.histograms.Observe("request_num_preemptions", 0)
	c.histograms.Observe("time_to_first_token_seconds", t.first.Seconds())
	c.histograms.Observe("e2e_request_latency_seconds", t.whole.Seconds())
	c.histograms.Observe("request_queue_time_seconds", t.queued.Seconds())
	c.histograms.Observe("request_prefill_time_seconds", t.prefill.Seconds())
	c.histograms.Observe("request_decode_time_seconds", t.decode.Seconds())
	c.histograms.Observe("request_inference_time_seconds", (t.prefill + t.decode).Seconds())
	if tokens > 1 {
		each := t.decode.Seconds() / float64(tokens-1)
		c.histograms.Observe("request_time_per_output_token_seconds", each)
	}
}
