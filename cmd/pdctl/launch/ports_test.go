// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPortsGoRoundThoseOfOthers(t *testing.T) {
	for rule, c := range map[string]struct {
		at, n int
		taken []span
		want  int
	}{
		"free":                            {5600, 1, nil, 5600},
		"the next one":                    {5600, 1, []span{{5600, 5601}}, 5601},
		"past several, in no order":       {5600, 1, []span{{5601, 5603}, {5600, 5601}}, 5603},
		"a run that does not fit between": {5600, 2, []span{{5601, 5602}}, 5602},
		"a run that fits before":          {5600, 2, []span{{5602, 5604}}, 5600},
	} {
		assert.Equal(t, c.want, skip(c.at, c.n, c.taken), rule)
	}
}
