// SPDX-License-Identifier: Apache-2.0

package attr

import (
	"cmp"
	"errors"
	"strings"

	"github.com/pdkit/pdkit/discovery"
)

// The attributes that say which data-parallel ranks are behind an engine's URL, after vLLM's flags of these names. An
// engine whose ranks are spread over several URLs (one for each pod, or one for each rank) has an entry for each.
const (
	DPSize      = "dpSize"      // the ranks of the whole engine: --data-parallel-size
	DPSizeLocal = "dpSizeLocal" // those behind this URL: --data-parallel-size-local; all, if it is left out
	DPStartRank = "dpStartRank" // the number of the first rank behind this URL: --data-parallel-start-rank; else 0
	// Pods are the hosts of all pods of the engine, in the order of their ranks, separated by commas. Without it the
	// URL's host is that of all ranks behind it.
	Pods = "pods"
)

// maxRanks bounds the sizes. No engine has more ranks, so a larger number is a mistake.
const maxRanks = 65535

// Ranks are the data-parallel ranks behind an engine's URL.
//
// A request names its rank by the number behind the URL, 0 to Local-1: that is Session.PrefillRank, and vLLM's header
// X-data-parallel-rank (v1/engine/input_processor.py of 0.32.0: with --data-parallel-hybrid-lb and with a port for each
// rank the number must be below --data-parallel-size-local). What an engine names after a rank has the number among
// all ranks of the engine, Start higher: the ports of NIXL's side channel and of the P2P tier, engine ids
// (data_parallel_index).
type Ranks struct {
	Local int // 1 or more
	Start int
	Size  int // of the whole engine: Start+Local or more
}

// RanksOf reads an endpoint's attributes [DPSize], [DPSizeLocal] and [DPStartRank]. Without them there is one rank. The
// error joins an *[Error] for each that is malformed.
func RanksOf(e discovery.Endpoint) (Ranks, error) {
	size, err := Int(e, DPSize, 0, 1, maxRanks)
	local, errLocal := Int(e, DPSizeLocal, cmp.Or(size, 1), 1, cmp.Or(size, maxRanks))
	start, errStart := Int(e, DPStartRank, 0, 0, maxRanks)
	if err != nil || errLocal != nil || errStart != nil {
		return Ranks{}, errors.Join(err, errLocal, errStart)
	}
	return Ranks{Local: local, Start: start, Size: max(size, start+local)}, nil
}

// Host returns the host of the pod in which rank n behind the URL of e runs. That is another one than the URL's if one
// URL serves for all pods of the engine (vLLM's --headless) and [Pods] names them. The error is an *[Error].
func (r Ranks) Host(e discovery.Endpoint, n int) (string, error) {
	text := e.Attribute(Pods)
	if text == "" || r.Local < r.Size {
		return e.Host(), nil
	}
	hosts := strings.Split(text, ",")
	for i, host := range hosts {
		hosts[i] = strings.TrimSpace(host)
		if hosts[i] == "" || strings.ContainsAny(hosts[i], " /[]@") {
			return "", bad(e, Pods, "is not a list of hosts' names or addresses")
		}
	}
	return hosts[min(n*len(hosts)/r.Size, len(hosts)-1)], nil
}
