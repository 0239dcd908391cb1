// SPDX-License-Identifier: Apache-2.0

package enginesim

// Stats are an engine's counters since its start or last Restart, and its gauges now.
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
