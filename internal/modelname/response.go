// SPDX-License-Identifier: Apache-2.0

package modelname

import (
	"unsafe"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Mark is in each event and in each whole response that names its model. No text has it, since a quote in a text is
// escaped.
var Mark = []byte(`"model"`)

// places are where the APIs' events and whole responses have the model's name: at the top level, in the events of the
// Responses API, and in message_start of the Messages API.
var places = [...]string{"model", "response.model", "message.model"}

// PutBack returns a function that writes the name that a client has asked for into an event or a whole response,
// whichever name the engine has written: one that serves a model by several names writes the first. What the function
// returns is valid until its next call, and is data itself if that names no model.
func PutBack(asked string) func(data []byte) []byte {
	name := jsonedit.Quote(asked)
	var buf []byte
	return func(data []byte) []byte {
		text := unsafe.String(unsafe.SliceData(data), len(data)) // data does not change meanwhile
		for _, place := range places {
			v := gjson.Get(text, place)
			if v.Type != gjson.String || v.Index <= 0 {
				continue
			}
			buf = append(append(append(buf[:0], data[:v.Index]...), name...), data[v.Index+len(v.Raw):]...)
			return buf
		}
		return data
	}
}
