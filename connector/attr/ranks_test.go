// SPDX-License-Identifier: Apache-2.0

package attr_test

import (
	"strings"
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
	e, err := discovery.New("http://10.0.0.1:8000", discovery.RolePrefill)
	require.NoError(t, err)
	for _, c := range []struct {
		size, local, pods string
		want              string // the hosts of the ranks
	}{
		{"2", "", "", "10.0.0.1,10.0.0.1"},
		{"4", "", "10.0.0.1,10.0.0.2", "10.0.0.1,10.0.0.1,10.0.0.2,10.0.0.2"},
		{"2", "", "a,b, c ,d", "a,c"}, // a rank is in two pods: the first one counts
		{"4", "2", "10.0.0.1,10.0.0.2", "10.0.0.1,10.0.0.1"},
		{"", "", "a,b", "a"},
	} {
		e.Attributes = map[string]string{attr.DPSize: c.size, attr.DPSizeLocal: c.local, attr.Pods: c.pods}
		ranks, err := attr.RanksOf(e)
		require.NoError(t, err)
		var hosts []string
		for n := range ranks.Local {
			host, err := ranks.Host(e, n)
			require.NoError(t, err)
			hosts = append(hosts, host)
		}
		assert.Equal(t, c.want, strings.Join(hosts, ","), "%+v", c)
	}
	e.Attributes = map[string]string{attr.DPSize: "2", attr.Pods: "a,"}
	_, err = attr.Ranks{Local: 2, Size: 2}.Host(e, 0)
	require.EqualError(t, err, "endpoint 10.0.0.1:8000: attribute pods is not a list of hosts' names or addresses")
	_, err = attr.RanksOf(discovery.Endpoint{Attributes: map[string]string{attr.DPSize: "4", attr.DPSizeLocal: "5",
		attr.DPStartRank: "-1"}})
	var wrong []string
	for _, fault := range config.FieldErrors(attr.Faults(err, nil)) {
		wrong = append(wrong, fault.Path)
	}
	assert.Equal(t, []string{"attributes.dpSizeLocal", "attributes.dpStartRank"}, wrong)
}
