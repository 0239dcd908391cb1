// SPDX-License-Identifier: Apache-2.0

// Package estimate tells from a request, without a tokenizer, how many tokens it is about.
package estimate

import (
	"bytes"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

const (
	bytesPerToken = 4    // of text
	mediaLeast    = 1024 // bytes of a picture or a sound in a prompt: less is counted as text
	mediaTokens   = 1024 // of one, in a usual model and size
)

// beside are members that chat templates put into the prompt, beside the one that the API names.
var beside = [...]string{"tools", "system", "instructions"}

// Prompt counts the prompt's token ids, of one prompt or of a list with one, and then it is exact. Four bytes of text
// are taken for a token. A picture or a sound in the body is not as many tokens as its bytes would be.
func Prompt(r *connector.ClientRequest) (tokens int, exact bool) {
	size := 0
	for _, name := range [...]string{r.API.PromptMember(), "input_ids"} {
		raw, ok := r.Field(name)
		if !ok || name == "" {
			continue
		}
		if ids := countIDs(raw); ids > 0 {
			return ids, true
		}
		size += textBytes(r.API, raw)
	}
	if size == 0 {
		size = len(r.Body())
	} else {
		for _, name := range beside {
			if raw, ok := r.Field(name); ok {
				size += len(raw)
			}
		}
	}
	return size/bytesPerToken + 1, false
}

// Body is about how many tokens a request's body has, if a picture or a sound is not as many as its bytes would be.
func Body(r *connector.ClientRequest) int {
	size := len(r.Body())
	if raw, ok := r.Field(r.API.PromptMember()); ok {
		size += textBytes(r.API, raw) - len(raw)
	}
	return size/bytesPerToken + 1
}

// textBytes is about how many bytes of text a member has, or is worth. A string that is a data URL, or the member data
// of a picture or sound, is worth mediaTokens.
func textBytes(api connector.API, raw []byte) int {
	size := len(raw)
	if size < mediaLeast || api != connector.APIChat && api != connector.APIResponses && api != connector.APIMessages {
		return size
	}
	from := 0 // after the quote before, if there is one
	for {
		n := bytes.IndexByte(raw[from:], '"')
		if n < 0 {
			return size
		}
		if from > 0 && n >= mediaLeast && (bytes.HasPrefix(raw[from:], dataURL) || isData(raw[:from-1])) {
			size += mediaTokens*bytesPerToken - n
		}
		from += n + 1
	}
}

var dataURL = []byte("data:")

// isData reports whether what stands before a string makes it the value of a member data.
func isData(before []byte) bool {
	before = bytes.TrimRight(before, " \t\r\n")
	name, ok := bytes.CutSuffix(before, []byte{':'})
	return ok && bytes.HasSuffix(bytes.TrimRight(name, " \t\r\n"), []byte(`"data"`))
}

// countIDs returns how many numbers a JSON array of numbers has, or the only array in it. 0: it is something else.
func countIDs(raw []byte) int {
	if jsonedit.Kind(raw) != jsonedit.Array {
		return 0
	}
	inner := bytes.TrimLeft(raw, "[ \t\r\n")
	if len(inner) == 0 || inner[0] < '0' || inner[0] > '9' {
		return 0
	}
	return bytes.Count(inner, []byte{','}) + 1
}

// Limit returns the request's token limit, which each API keeps in another member; 0 if it has none.
func Limit(r *connector.ClientRequest) int64 {
	for _, name := range [...]string{"max_completion_tokens", "max_tokens", "max_output_tokens"} {
		if raw, ok := r.Field(name); ok {
			n, ok := jsonedit.Int(raw)
			if !ok {
				n = gjson.ParseBytes(raw).Int() // 16.0 is a limit, too
			}
			if n > 0 {
				return n
			}
		}
	}
	if raw, ok := r.Field("sampling_params"); ok {
		for _, name := range [...]string{"max_tokens", "max_new_tokens"} {
			if n := gjson.GetBytes(raw, name).Int(); n > 0 {
				return n
			}
		}
	}
	return 0
}
