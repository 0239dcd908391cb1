// SPDX-License-Identifier: Apache-2.0

package attr_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
)

func TestFaultsOfAttributesAreThoseOfTheEntry(t *testing.T) {
	require.NoError(t, attr.Faults(nil, nil))
	require.NoError(t, attr.Faults(errors.Join(nil, nil), nil))
	port := &attr.Error{Endpoint: "e", Attribute: "port", Problem: "is missing"}
	host := &attr.Error{Endpoint: "e", Attribute: "host", Problem: "is odd"}
	other := errors.New("other")
	err := attr.Faults(errors.Join(fmt.Errorf("in: %w", port), nil, host, other),
		map[string]string{"port": "1 to 65535"})
	assert.Equal(t, []*config.FieldError{
		{Path: "attributes.port", Problem: "is missing", Remedy: "1 to 65535"},
		{Path: "attributes.host", Problem: "is odd"}, {Problem: "other"},
	}, config.FieldErrors(err))
	require.ErrorIs(t, err, other)
}
