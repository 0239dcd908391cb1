// SPDX-License-Identifier: Apache-2.0

package modelserver_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestTheModelAsEnginesKnowIt(t *testing.T) {
	for spec, want := range map[string]string{
		`{}`:            "*",
		`{"model":"m"}`: "m",
		`{"model":"gpt-4o","modelNames":{"gpt-4o":"big"}}`:            "big",
		`{"model":"big","modelNames":{"gpt-4o":"big"}}`:               "big",
		`{"model":"gpt-4o","modelNames":{"*":"big"}}`:                 "big",
		`{"modelNames":{"*":"big"}}`:                                  "big",
		`{"modelNames":{"a":"big"}}`:                                  "*",
		`{"model":"gpt-4o","modelNames":{"*":"big","gpt-4o":"huge"}}`: "huge",
	} {
		assert.Equal(t, want, read(t, spec).ServedModel(), spec)
	}
}
