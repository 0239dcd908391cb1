// SPDX-License-Identifier: Apache-2.0

package attr_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

func TestWhichRanksAreBehindAURL(t *testing.T) {
	for _, c := range []struct {
		size, local, start string
		want               attr.Ranks
	}{
		{"", "", "", attr.Ranks{Local: 1, Size: 1}},
		{"8", "", "", attr.Ranks{Local: 8, Size: 8}},
		{"16", "8", "", attr.Ranks{Local: 8, Size: 16}},
		{"16", "8", "8", attr.Ranks{Local: 8, Start: 8, Size: 16}},
		{"16", "1", "11", attr.Ranks{Local: 1, Start: 11, Size: 16}},
		{"", "1", "3", attr.Ranks{Local: 1, Start: 3, Size: 4}},
		{"8", "", "8", attr.Ranks{Local: 8, Start: 8, Size: 16}}, // the size is that of one pod
	} {
		e := discovery.Endpoint{Attributes: map[string]string{attr.DPSize: c.size, attr.DPSizeLocal: c.local,
			attr.DPStartRank: c.start}}
		got, err := attr.RanksOf(e)
		require.NoError(t, err)
		assert.Equal(t, c.want, got, "%+v", c)
	}
	_, err := attr.RanksOf(discovery.Endpoint{Attributes: map[string]string{attr.DPSize: "4", attr.DPSizeLocal: "5",
		attr.DPStartRank: "-1"}})
	var wrong []string
	for _, fault := range config.FieldErrors(attr.Faults(err, nil)) {
		wrong = append(wrong, fault.Path)
	}
	assert.Equal(t, []string{"attributes.dpSizeLocal", "attributes.dpStartRank"}, wrong)
}
