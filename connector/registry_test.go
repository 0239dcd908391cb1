// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	_ "github.com/pdkit/pdkit/connector/all"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
)

func TestOpenOfAnUnknownNameNamesTheNearestOne(t *testing.T) {
	for typ, want := range map[string]string{"nxil": "did you mean nixl?", "NIXL": "did you mean nixl?",
		"nixlconnector": "did you mean NixlConnector?", " nixl": "did you mean nixl?",
		"quantum": "known are " + strings.Join(names.Connectors(), ", ")} {
		_, err := connector.Open(config.Spec{Type: typ})
		require.ErrorIs(t, err, names.ErrUnknown, typ)
		assert.True(t, strings.HasSuffix(err.Error(), "; "+want), err)
		assert.Equal(t, typ, names.Resolve(typ, nil), "as it is")
	}
}

// A class that no connector can serve is refused with the reason, and not as a name that nobody knows.
func TestOpenOfARefusedClassSaysWhy(t *testing.T) {
	names.Refuse("RefusedForTests", "keeps everything to itself")
	assert.Equal(t, "keeps everything to itself", names.Refusal("RefusedForTests"))
	assert.Empty(t, names.Refusal("NixlConnector"))
	_, err := connector.Open(config.Spec{Type: "RefusedForTests"})
	require.ErrorIs(t, err, names.ErrUnknown)
	assert.ErrorContains(t, err, "it keeps everything to itself")
	assert.NotContains(t, err.Error(), "did you mean")
}

func TestNamesAreSortedAndLowerCase(t *testing.T) {
	names := names.Connectors()
	assert.True(t, slices.IsSorted(names))
	assert.Subset(t, names, []string{"http", "nixl"})
}

var registered atomic.Int64

func TestRegisterIsForInitAndPanicsOnMistakes(t *testing.T) {
	f := func(json.RawMessage) (connector.KVConnector, error) { return fake{}, nil }
	// The registry is global and forgets nothing; -count runs the test again.
	number := strconv.FormatInt(registered.Add(1), 10)
	connector.Register("registry-test"+number, f, "RegistryTestConnector"+number)
	c, err := connector.Open(config.Spec{Type: "RegistryTestConnector" + number})
	require.NoError(t, err)
	assert.Equal(t, fake{}, c)

	assert.Panics(t, func() { connector.Register("", f) }, "no name")
	assert.Panics(t, func() { connector.Register("Registry", f) }, "not lower case")
	assert.Panics(t, func() { connector.Register("registry-nil", nil) }, "no factory")
	assert.Panics(t, func() { connector.Register("registry-test"+number, f) }, "taken")
	assert.Panics(t, func() { connector.Register("registry-class", f, "NixlConnector") }, "class taken")
	assert.Panics(t, func() { connector.Register("registry-class2", f, "") }, "empty class")
}
