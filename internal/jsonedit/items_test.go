// SPDX-License-Identifier: Apache-2.0

package jsonedit_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// items are an array's items with bars between them; ! is one that is malformed.
func items(array string) string {
	var all []string
	for item := range jsonedit.Items([]byte(array)) {
		if item == nil {
			item = []byte("!")
		}
		all = append(all, string(item))
	}
	return strings.Join(all, "|")
}

func TestItemsOfAnArray(t *testing.T) {
	for array, want := range map[string]string{
		"[]": "", " [ ] ": "", "[1]": "1",
		`[ "a,]" , [1,2],{"b":[3]} ,-1.5e3, null,true ]`: `"a,]"|[1,2]|{"b":[3]}|-1.5e3|null|true`,
		"": "!", "7": "!", "[": "!", "[1": "1|!", "[1,": "1|!", "[1,]": "1|!", "[,1]": "!", "[1 2]": "1|!",
		`["a`: "!", "[[1]": "[1]|!", "[1}": "1|!", "[nul]": "!", "[[1}]": "!",
	} {
		assert.Equal(t, want, items(array), array)
	}
	for range jsonedit.Items([]byte("[1,2,3]")) {
		break // nothing is read past the first
	}
}

func FuzzItems(f *testing.F) {
	f.Add(`[1,"a",[2],{"b":3}]`)
	f.Fuzz(func(t *testing.T, array string) {
		var want []json.RawMessage
		if json.Unmarshal([]byte(array), &want) != nil || want == nil {
			_ = items(array)
			return
		}
		var got []json.RawMessage
		for item := range jsonedit.Items([]byte(array)) {
			got = append(got, item)
		}
		if len(got) != len(want) {
			t.Fatalf("%d items of %q, want %d", len(got), array, len(want))
		}
		for i := range got {
			if string(got[i]) != string(want[i]) {
				t.Fatalf("item %d of %q is %q, want %q", i, array, got[i], want[i])
			}
		}
	})
}
