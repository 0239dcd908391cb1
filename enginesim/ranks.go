// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// StartRanks starts the n data-parallel ranks of one pod, each with an HTTP port of its own, as vLLM does with
// --data-parallel-multi-port-external-lb (entrypoints/launchers/dp_supervisor.py of 0.32.0). start is the number of the
// first rank among all ranks of the engine, which may be spread over several pods.
//
// Rank i listens at the port of cfg.Listen plus i. The number among all ranks, start plus i, is added to the port of
// cfg.SideChannel, and is the end of the engine id, EngineID_dpN, as in vLLM. A gateway that takes one of the ranks for
// another tells decode a port at which nobody listens, or where its prompt is not known. Both ports must be given, and
// cfg.EngineID is a random one if it is missing. After an error no rank runs.
func StartRanks(cfg Config, start, n int) ([]*Engine, error) {
	if start < 0 || n < 1 {
		return nil, fmt.Errorf("enginesim: %d ranks from %d on", n, start)
	}
	id := cmp.Or(cfg.EngineID, core.NewUUID())
	var ranks []*Engine
	for i := range n {
		of := cfg
		var errListen, errSide error
		of.EngineID = id + "_dp" + strconv.Itoa(start+i)
		of.Listen, errListen = higher(cfg.Listen, i)
		of.SideChannel, errSide = higher(cfg.SideChannel, start+i)
		err := errors.Join(errListen, errSide)
		var e *Engine
		if err == nil {
			e, err = Start(of)
		}
		if err != nil {
			for _, e := range ranks {
				_ = e.Close()
			}
			return nil, err
		}
		ranks = append(ranks, e)
	}
	return ranks, nil
}

// higher adds n to the port of an address.
func higher(address string, n int) (string, error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return "", fmt.Errorf("enginesim: ranks need Listen and SideChannel: %w", err)
	}
	port, err := strconv.Atoi(text)
	if err != nil || port < 1 || port+n > 65535 {
		return "", errors.New("enginesim: ranks need Listen and SideChannel with ports, and ports above them")
	}
	return net.JoinHostPort(host, strconv.Itoa(port+n)), nil
}
