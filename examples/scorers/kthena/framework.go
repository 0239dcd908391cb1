// SPDX-License-Identifier: Apache-2.0

package kthena

// What follows stands for packages of github.com/volcano-sh/kthena, so that this example needs no other module: the
// signatures, with the members that the plugin uses, of pkg/kthena-router at these commits:
//
//	scheduler/framework/interface.go                 0d6a828e729d6d831f68860d2298897df97d687f
//	datastore (PodInfo, by scheduler/plugins/*.go)   0c7d6ae163b825b0d0e2a0969aba6c5a1f48e6a3
//
// A plugin of Kthena's imports framework and datastore.
type (
	// Context is framework.Context.
	Context struct {
		Model                   string
		Hashes                  []uint64
		DecodePods, PrefillPods []*PodInfo
	}
	// ScorePlugin is framework.ScorePlugin: scores are 0 to 100.
	ScorePlugin interface {
		Name() string
		Score(ctx *Context, pods []*PodInfo) map[*PodInfo]int
	}
	// PodInfo is datastore.PodInfo.
	PodInfo struct{ waiting, running, gpuCacheUsage float64 }
)

// GetRequestWaitingNum returns the number of waiting requests.
func (p *PodInfo) GetRequestWaitingNum() float64 { return p.waiting }

// GetRequestRunningNum returns the number of running requests.
func (p *PodInfo) GetRequestRunningNum() float64 { return p.running }

// GetGPUCacheUsage returns which part of the KV cache is in use.
func (p *PodInfo) GetGPUCacheUsage() float64 { return p.gpuCacheUsage }
