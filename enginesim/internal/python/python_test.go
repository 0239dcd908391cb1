// SPDX-License-Identifier: Apache-2.0

package python_test

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/enginesim/internal/python"
)

func TestEncodeEscapesNoHTML(t *testing.T) {
	assert.Equal(t, `{"a":"<b>&"}`, string(python.Encode(map[string]string{"a": "<b>&"})))
	assert.Equal(t, "null", string(python.Encode(math.NaN())), "what JSON cannot say")
}

func TestMembersKeepTheirOrder(t *testing.T) {
	o := python.Object{"z", 1, "a", python.Object{"<", nil}, "list", []python.Object{{"x", []int(nil)}, nil}}
	assert.Equal(t, `{"z":1,"a":{"<":null},"list":[{"x":null},null]}`, string(python.Encode(o)))
	assert.Equal(t, `{"in":{"z":1}}`, string(python.Encode(map[string]any{"in": o[:2]})), "in other values, too")
	assert.Equal(t, `{"z":1,"a":2,"new":3}`, string(python.Encode(o[:4].With(python.Object{"new", 3, "a", 2}))))
}

func TestNumbersHaveAFractionOrAnExponent(t *testing.T) {
	for v, want := range map[float64]string{0: "0.0", 12: "12.0", .25: "0.25", 2e6: "2e+06", math.Inf(1): "+Inf"} {
		assert.Equal(t, want, python.Number(v))
	}
}

func TestTruthyIsPythons(t *testing.T) {
	for _, raw := range []string{"", "null", "false", "0", `""`, "[]", "{}"} {
		assert.False(t, python.Truthy(json.RawMessage(raw)), raw)
	}
	for _, raw := range []string{"true", "1", `"0"`, "[[]]", "{\"a\":0}"} {
		assert.True(t, python.Truthy(json.RawMessage(raw)), raw)
	}
}
