// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"sync"
	"time"
)

// Stats are an engine's counters since its start or last Restart, and its gauges
// now.
type Stats struct {
	Requests int64 // that reached the scheduler
	Finished int64 // with length or stop
	Aborted  int64 // because the client left, or the engine was terminated
	Errors   int64 // because KV could not be loaded

	PromptTokens       int64 // of requests that got a first token
	LocalCompute       int64 // of these: computed here,
	LocalCacheHit      int64 // found in the prefix cache,
	ExternalKVTransfer int64 // read from another engine
	GenerationTokens   int64

	Transfers           int64 // reads from another engine that succeeded
	BytesTransferred    int64
	FailedTransfers     int64 // as vllm:nixl_num_failed_transfers counts them
	FailedNotifications int64
	Expired             int64 // handoffs whose lease ended unread
	AfterExpiry         int64 // releases of handoffs that were no longer known
	Preemptions         int64
	Orphans             int64 // reads by name that were given up before anybody offered that name

	MediaEncoded  int64 // media that an encode engine has encoded for others
	MediaLoaded   int64 // media that were taken over from an encode engine
	MediaComputed int64 // media that an engine that takes them over had to encode itself

	Running, Waiting int // requests now
	UsedBlocks       int // by requests and by handoffs
	PinnedBlocks     int // by handoffs alone
}

// counters is what an engine counts, for Stats and /metrics alike.
type counters struct {
	mu sync.Mutex
	Stats
	prefixQueries, prefixHits                int64
	externalQueries, externalHits            int64
	cachedTokens, cachedDevice, cachedP2P    int64
	successStop, successLength, successAbort int64
	loading                                  int64 // requests that wait for KV
	alone                                    bool  // the engine has no connector
	histograms                               map[string]*histogram
}

func newCounters() *counters { return &counters{histograms: newHistograms()} }

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
