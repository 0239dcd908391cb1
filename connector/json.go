// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"encoding/json"
	"strconv"
)

// Quote writes s as a JSON string. Text that is not UTF-8 is repaired.
func Quote(s string) json.RawMessage {
	raw, _ := json.Marshal(s) // it cannot fail for a string
	return raw
}

// Int writes n as JSON.
func Int[T ~int | ~int64 | ~uint64](n T) json.RawMessage {
	if n < 0 {
		return strconv.AppendInt(nil, int64(n), 10)
	}
	return strconv.AppendUint(nil, uint64(n), 10)
}
