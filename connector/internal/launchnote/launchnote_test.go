// SPDX-License-Identifier: Apache-2.0

package launchnote_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/launchnote"
)

func TestOnlyLimitsThatAreSetAreTold(t *testing.T) {
	assert.Empty(t, launchnote.Resources(connector.Resources{}, "why"))
	assert.Equal(t, []connector.Note{
		{NoEffect: true, Path: "resources.maxMemory", Text: "why"}, {NoEffect: true, Path: "resources.maxBandwidth", Text: "why"},
	}, launchnote.Resources(connector.Resources{MaxMemory: "8Gi", MaxBandwidth: "1G"}, "why"))
	assert.Equal(t, connector.Note{Path: "config.a", Text: "b"}, launchnote.Mapped("config.a", "b"))
}
