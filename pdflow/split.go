// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"errors"
	"hash/fnv"

	"github.com/pdkit/pdkit/connector"
)

// split is two flows that share one model's requests.
type split struct {
	main, other *Flow
	percent     uint64
}

// Split sends percent (0 to 100) of a model's requests to other and the rest to f, to try a connector on some of the
// traffic. A request's ID decides, so that a client that repeats an ID stays where it was. What it returns is ready
// when both flows are, without regard to one that has no share of the requests.
func (f *Flow) Split(other *Flow, percent int) (Server, error) {
	if f == nil || other == nil {
		return nil, errors.New("pdflow: Split needs two flows")
	}
	if percent < 0 || percent > 100 {
		return nil, errors.New("pdflow: Split needs 0 to 100 percent")
	}
	return &split{f, other, uint64(percent)}, nil
}

func (s *split) flowFor(_ *connector.ClientRequest, id string) *Flow {
	h := fnv.New64a() // the same on every replica
	_, _ = h.Write([]byte(id))
	if (h.Sum64()>>32)%100 < s.percent {
		return s.other
	}
	return s.main
}

func (s *split) names() []string { return append(s.main.names(), s.other.names()...) }

func (s *split) serves(model string) bool { return s.main.serves(model) || s.other.serves(model) }
