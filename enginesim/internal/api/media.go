// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/hex"
	"encoding/json"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// mediaTypes are the parts of a message that have to be encoded.
var mediaTypes = []string{"image_url", "audio_url", "video_url", "input_audio"}

// mediaHash names what a part holds: by its uuid, else by its content. ok is false for other parts.
func mediaHash(part json.RawMessage) (hash string, ok bool) {
	var p map[string]json.RawMessage
	var kind, uuid string
	if json.Unmarshal(part, &p) != nil || json.Unmarshal(p["type"], &kind) != nil {
		return "", false
	}
	for _, t := range mediaTypes {
		if t != kind {
			continue
		}
		if json.Unmarshal(p["uuid"], &uuid) == nil && uuid != "" {
			return uuid, true
		}
		var content bytes.Buffer
		if json.Compact(&content, p[kind]) != nil {
			return "", false
		}
		key := core.KeyOf(core.Tokenise(kind + content.String()))
		var b [16]byte
		for i := range b {
			b[i] = byte(key[i/8] >> (i % 8 * 8))
		}
		return hex.EncodeToString(b[:]), true
	}
	return "", false
}

// mediaText stands for a part in the prompt: tokens that only this medium has.
func mediaText(part json.RawMessage) string {
	if hash, ok := mediaHash(part); ok {
		return "<medium " + hash + ">"
	}
	return ""
}

// MediaOf gives the distinct hashes of a chat's media, in order.
func MediaOf(body []byte) []string {
	var q struct {
		Messages []struct {
			Content json.RawMessage `json:"content"`
		} `json:"messages"`
	}
	if json.Unmarshal(body, &q) != nil {
		return nil
	}
	var all []string
	seen := map[string]bool{}
	for _, m := range q.Messages {
		var parts []json.RawMessage
		if json.Unmarshal(m.Content, &parts) != nil {
			continue
		}
		for _, part := range parts {
			if hash, ok := mediaHash(part); ok && !seen[hash] {
				seen[hash] = true
				all = append(all, hash)
			}
		}
	}
	return all
}
