// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"errors"
	"hash/fnv"

	"github.com/pdkit/pdkit/connector"
)

// Split sends a share of one model's requests to another flow, to try a connector on some of the traffic. A request's
// ID decides, so that a client that repeats an ID stays where it was.
type Split struct {
	main, other *Flow
	percent     uint64
}

// NewSplit sends percent (0 to 100) of the requests to other, the rest to main.
func NewSplit(main, other *Flow, percent int) (*Split, error) {
	if main == nil || other == nil {
		return nil, errors.New("pdflow: NewSplit needs two flows")
	}
	if percent < 0 || percent > 100 {
		return nil, errors.New("pdflow: NewSplit needs 0 to 100 percent")
	}
	return &Split{main, other, uint64(percent)}, nil
}

func (s *Split) flowFor(_ *connector.ClientRequest, id string) *Flow {
	h := fnv.New64a() // the same on every replica
	_, _ = h.Write([]byte(id))
	if (h.Sum64()>>32)%100 < s.percent {
		return s.other
	}
	return s.main
}
