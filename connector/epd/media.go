// SPDX-License-Identifier: Apache-2.0

package epd

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// mediaTypes are the types of a chat message's parts that an encoder takes. Each part has its medium in a member with
// the name of its type.
var mediaTypes = []string{"image_url", "audio_url", "video_url", "input_audio"}

// mediaOf returns the media items of a chat, in order. If there are more than limit, it returns none, and tooMany is
// true. A body that it cannot read has none: the engine reports what is wrong with it.
func mediaOf(r *connector.ClientRequest, limit int) (items []connector.Item, tooMany bool) {
	raw, ok := r.Field("messages")
	if !ok || !mayHold(raw) || !json.Valid(raw) {
		return nil, false
	}
	gjson.ParseBytes(raw).ForEach(func(_, message gjson.Result) bool {
		content := message.Get("content")
		if !content.IsArray() {
			return true
		}
		content.ForEach(func(_, part gjson.Result) bool {
			if isMedium(part) {
				tooMany = len(items) == limit
				if !tooMany {
					items = append(items, itemOf(part.Raw))
				}
			}
			return !tooMany
		})
		return !tooMany
	})
	if tooMany {
		return nil, true
	}
	return items, false
}

// mayHold is a cheap test of the bytes, and false for most chats.
func mayHold(messages []byte) bool {
	return jsonedit.Kind(messages) == jsonedit.Array &&
		(bytes.Contains(messages, []byte(`_url"`)) || bytes.Contains(messages, []byte(`input_audio"`)))
}

// isMedium reports whether a part contains a medium. A part with only a uuid refers to something that an engine already
// has, so there is nothing to encode.
func isMedium(part gjson.Result) bool {
	if !part.IsObject() {
		return false
	}
	kind := part.Get("type").String()
	if !slices.Contains(mediaTypes, kind) {
		return false
	}
	medium := part.Get(kind)
	return medium.Exists() && medium.Type != gjson.Null
}

func itemOf(part string) connector.Item {
	sum := sha256.Sum256([]byte(part))
	return connector.Item{ID: hex.EncodeToString(sum[:]), Part: json.RawMessage(part)}
}
