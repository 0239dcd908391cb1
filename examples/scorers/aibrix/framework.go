// SPDX-License-Identifier: Apache-2.0

package aibrix

// What follows stands for packages of github.com/vllm-project/aibrix and Kubernetes, so that this example needs no
// other module: the signatures, with the members that the policies use, of
// pkg/plugins/gateway/algorithms/pd at these commits:
//
//	prefill_scorer.go   08e6caca346c4d1eefec24ebe768205e88a2055f
//	decode_scorer.go    0779ef57defe6ea3ab9b1b06afba7f69e801d883
//
// A policy of AIBrix's is registered there (RegisterDecodePolicy), and imports these types.
type (
	// Pod is v1.Pod of k8s.io/api/core.
	Pod struct{ Name string }
	// RoutingContext is types.RoutingContext.
	RoutingContext struct{ Model, Message string }

	// PrefillScorer scores pods for one request: lower is better.
	PrefillScorer interface {
		ScorePod(pod *Pod, reqCnt, maxRequestCount float64) float64
		PrefixHashes() []uint64
	}
	// PrefillScorePolicy makes a scorer for each request.
	PrefillScorePolicy interface {
		Prepare(routingCtx *RoutingContext, pods []*Pod, readyPodsMap map[string]struct{}) (PrefillScorer, error)
		Name() string
	}
	// DecodePolicyName is a policy's name.
	DecodePolicyName string
	// DecodePodInput is what the router knows of a decode pod.
	DecodePodInput struct {
		RunningReqs, FreeGPUPercent, DecodeTokens float64
	}
	// DecodeScorePolicy scores decode pods: lower is better.
	DecodeScorePolicy interface {
		Name() DecodePolicyName
		Describe() string
		ScoreDecodePod(routingCtx *RoutingContext, pod *Pod, in DecodePodInput) float64
	}
)
