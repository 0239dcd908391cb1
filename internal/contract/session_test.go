// SPDX-License-Identifier: Apache-2.0

package contract_test

import (
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func endpoint(id string, attributes map[string]string) discovery.Endpoint {
	return discovery.Endpoint{ID: id, Attributes: attributes}
}

func TestASessionIsOneAttemptWithItsOwnID(t *testing.T) {
	r := parse(t, connector.APIChat, `{"model":"m","a":1,"b":null}`)
	p, d := endpoint("p", nil), endpoint("d", nil)
	before := time.Now()
	s := contract.NewSession(r, "client-id", p, d)
	assert.Regexp(t, `^[0-9a-f]{32}$`, s.ID)
	assert.Equal(t, "client-id", s.RequestID)
	assert.Equal(t, "m", s.Model)
	assert.Equal(t, connector.APIChat, s.API)
	assert.Same(t, r, s.Request)
	assert.Equal(t, p, s.Prefill)
	assert.Equal(t, d, s.Decode)
	assert.Equal(t, 1, s.Attempt)
	assert.WithinRange(t, s.CreatedAt, before, time.Now())
	assert.Zero(t, s.ExpiresAt, "the flow sets it, where there is a lease")
	raw, ok := s.Field("a")
	assert.True(t, ok)
	assert.Equal(t, "1", string(raw))
	_, ok = s.Field("b")
	assert.False(t, ok)

	again := contract.NewSession(r, "client-id", p, d)
	assert.NotEqual(t, s.ID, again.ID, "a retry of the same request at the same pair")
	assert.NotEqual(t, s.UUID(), again.UUID())
	assert.NotEqual(t, s.Uint64(), again.Uint64())
}

func TestBothLegsSeeTheSameRandomValues(t *testing.T) {
	uuid := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	r := parse(t, connector.APIChat, `{}`)
	for range 100 {
		s := contract.NewSession(r, "", endpoint("p", map[string]string{"dpSize": "7"}),
			endpoint("d", map[string]string{"dpSize": "3"}))
		assert.Regexp(t, uuid, s.UUID(), "version 4, variant 1")
		assert.Equal(t, s.UUID(), s.UUID())
		assert.Equal(t, s.Uint64(), s.Uint64())
	}
}

func TestRanksCoverTheEnginesDataParallelSize(t *testing.T) {
	r := parse(t, connector.APIChat, `{}`)
	p, d := map[int]bool{}, map[int]bool{}
	for range 400 {
		s := contract.NewSession(r, "", endpoint("p", map[string]string{"dpSize": "4"}),
			endpoint("d", map[string]string{"dpSize": "2"}))
		p[s.PrefillRank], d[s.DecodeRank] = true, true
	}
	assert.Equal(t, map[int]bool{0: true, 1: true, 2: true, 3: true}, p)
	assert.Equal(t, map[int]bool{0: true, 1: true}, d)
	for _, size := range []string{"", "1", "0", "-3", "x", "2.5", strconv.FormatUint(1<<63, 10)} {
		s := contract.NewSession(r, "", endpoint("p", map[string]string{"dpSize": size}), endpoint("d", nil))
		assert.Zero(t, s.PrefillRank, "dpSize %q", size)
		assert.Zero(t, s.DecodeRank)
	}
	for range 100 {
		s := contract.NewSession(r, "", endpoint("p", map[string]string{"dpSize": "16", "dpSizeLocal": "2",
			"dpStartRank": "4"}), endpoint("d", nil))
		assert.Less(t, s.PrefillRank, 2, "the ranks behind the URL")
	}
	// The number is larger than the range from which the rank is drawn: no modulus of 0, so no panic.
	s := contract.NewSession(r, "", endpoint("p", map[string]string{"dpSize": "4294967296"}), endpoint("d", nil))
	assert.Zero(t, s.PrefillRank)
}
