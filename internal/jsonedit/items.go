// SPDX-License-Identifier: Apache-2.0

package jsonedit

import "iter"

// Items goes through the items of an array, which it does not decode. Where the array, or an item, is malformed, the
// last item is nil. Of containers only the brackets are checked.
func Items(array []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		i := skipSpace(array, 0)
		if i == len(array) || array[i] != '[' {
			yield(nil)
			return
		}
		if i = skipSpace(array, i+1); i < len(array) && array[i] == ']' {
			return
		}
		for {
			end, err := valueEnd(array, i)
			if err != nil {
				yield(nil)
				return
			}
			if !yield(array[i:end]) {
				return
			}
			switch i = skipSpace(array, end); {
			case i < len(array) && array[i] == ']':
				return
			case i < len(array) && array[i] == ',':
				i = skipSpace(array, i+1)
			default:
				yield(nil)
				return
			}
		}
	}
}
