// SPDX-License-Identifier: Apache-2.0

package llmd

import (
	"context"
	"time"
)

// What follows stands for packages of github.com/llm-d/llm-d-router, so that this example needs no other module: the
// signatures, with the members that the plugin uses, of pkg/epp/framework/interface at these commits:
//
//	scheduling/plugins.go      5c414891ccaa775c8f2c3bbbd6b6114550ec967c
//	scheduling/types.go        98f9aa0d59529a4720e7881cb8e1bbd6f45cc785
//	requestcontrol/plugins.go  116d94ec993bfc8f20704615fd8124fd35160be0
//	datalayer/attributemap.go  03a70c3bab4e204b1cbe69304591f1a976095e7f
//	datalayer/metrics.go       0bcc84e11365d3a826044b34dc78b3a4c76670b5
//	plugin/datakey.go          a335e0244eb63eb95119e0ed6207b977bfba2eca
//
// A plugin of llm-d's imports those, and names PrefixCacheMatchInfo of
// pkg/epp/framework/plugins/datalayer/attribute/prefix (08e7a938ac3d527b7c8f4f5ff59cbe9ea79f7527).

type (
	// TypedName is a plugin's type and name.
	TypedName struct{ Type, Name string }
	// Plugin is what all plugins are.
	Plugin interface{ TypedName() TypedName }
	// DataKey is the name of what a producer puts at endpoints.
	DataKey struct{ dataType, producerName string }
	// Cloneable is what can be put there.
	Cloneable interface{ Clone() Cloneable }

	// InferenceRequest is a client's request.
	InferenceRequest struct {
		RequestID, TargetModel string
		RequestSizeBytes       int
	}
	// Metrics is what the router has read of an endpoint's metrics.
	Metrics struct {
		RunningRequestsSize, WaitingQueueSize int
		KVCacheUsagePercent                   float64
		KvCacheMaxTokenCapacity               int
		UpdateTime                            time.Time
	}
	// Endpoint is one inference server.
	Endpoint interface {
		GetMetrics() *Metrics
		String() string
		Get(key DataKey) (Cloneable, bool)
		Put(key DataKey, value Cloneable)
	}
	// ProfileRunResult is what a profile has chosen.
	ProfileRunResult struct{ TargetEndpoints []Endpoint }
	// SchedulingResult is what the router does.
	SchedulingResult struct {
		ProfileResults     map[string]*ProfileRunResult
		PrimaryProfileName string
	}
	// SchedulerProfile is a profile, which the framework runs.
	SchedulerProfile any
	// ScorerCategory is what a scorer prefers.
	ScorerCategory string

	// DataProducer is asked before all others.
	DataProducer interface {
		Plugin
		Produces() map[DataKey]any
		Produce(ctx context.Context, request *InferenceRequest, pods []Endpoint) error
	}
	// Scorer is asked for 0 to 1 for each endpoint.
	Scorer interface {
		Plugin
		Category() ScorerCategory
		Score(ctx context.Context, request *InferenceRequest, pods []Endpoint) map[Endpoint]float64
	}
	// Admitter is asked whether a request is admitted.
	Admitter interface {
		Plugin
		Admit(ctx context.Context, request *InferenceRequest, pods []Endpoint) error
	}
	// ProfileHandler is asked which profiles run, and what their results mean.
	ProfileHandler interface {
		Plugin
		Pick(ctx context.Context, request *InferenceRequest, profiles map[string]SchedulerProfile,
			profileResults map[string]*ProfileRunResult) map[string]SchedulerProfile
		ProcessResults(ctx context.Context, request *InferenceRequest,
			profileResults map[string]*ProfileRunResult) (*SchedulingResult, error)
	}

	profiles = map[string]SchedulerProfile  // short names of this example
	results  = map[string]*ProfileRunResult //
)

// NewDataKey names what a producer puts at endpoints.
func NewDataKey(dataType, producerName string) DataKey { return DataKey{dataType, producerName} }

// PrefixCacheMatchInfo is how much of a prompt one endpoint has.
type PrefixCacheMatchInfo struct{ matchBlocks, totalBlocks, blockSizeTokens int }

// NewPrefixCacheMatchInfo returns it for a number of blocks.
func NewPrefixCacheMatchInfo(matchBlocks, totalBlocks, blockSizeTokens int) *PrefixCacheMatchInfo {
	return &PrefixCacheMatchInfo{matchBlocks, totalBlocks, blockSizeTokens}
}

// MatchBlocksUnweighted is how many blocks the endpoint has.
func (p *PrefixCacheMatchInfo) MatchBlocksUnweighted() int { return p.matchBlocks }

// BlockSizeTokens is the size of one block.
func (p *PrefixCacheMatchInfo) BlockSizeTokens() int { return p.blockSizeTokens }

// Clone copies it.
func (p *PrefixCacheMatchInfo) Clone() Cloneable { c := *p; return &c }
