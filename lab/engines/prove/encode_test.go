// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"encoding/base64"
	"image/png"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// sight is a chat with one image that went as it must.
func sight(change func(*seen)) []seen {
	s := seen{look: look{question: question{name: "one image"}, images: 1}, encoded: 1, tokens: 96,
		response: answered(http.StatusOK, "a", 96), reference: "a"}
	change(&s)
	return []seen{s}
}

func TestTheEncodeStageIsProvenByTextsFilesAndCounters(t *testing.T) {
	assert.Empty(t, encodeProblems(sight(func(*seen) {})))
	for name, wrong := range map[string]func(*seen){
		"P did not see the image":           func(s *seen) { s.response.Texts[0] = "b" },
		"the response was cut":              func(s *seen) { s.response.Whole = false },
		"an error":                          func(s *seen) { s.response.status = http.StatusBadGateway },
		"E encoded nothing":                 func(s *seen) { s.encoded = 0 },
		"E encoded the same image twice":    func(s *seen) { s.encoded = 2 },
		"D computed the prompt by itself":   func(s *seen) { s.tokens = 0 },
		"D computed the image by itself":    func(s *seen) { s.tokens = 80 },
		"no prompt tokens were counted":     func(s *seen) { s.response.PromptTokens, s.tokens = 0, 0 },
		"an image where the text has none":  func(s *seen) { s.look.images = 0 },
		"the embeddings of another request": func(s *seen) { s.encoded = 3 },
	} {
		assert.NotEmpty(t, encodeProblems(sight(wrong)), name)
	}
}

func TestTheCutFolderMustShowInTheTextsOfImagesOnly(t *testing.T) {
	wrongText := func(s *seen) { s.response.Texts[0] = "b" }
	assert.Empty(t, uncutProblems(sight(wrongText)))
	assert.NotEmpty(t, uncutProblems(sight(func(*seen) {})), "the text is right although P had no embedding")
	assert.Empty(t, uncutProblems(sight(func(s *seen) { s.look.images, s.encoded = 0, 0 })))
	for name, wrong := range map[string]func(*seen){
		"a wrong text without an image": func(s *seen) { s.look.images, s.encoded = 0, 0 },
		"E did not encode":              func(s *seen) { s.encoded = 0 },
		"an error":                      func(s *seen) { s.response.status = http.StatusBadGateway },
	} {
		assert.NotEmpty(t, uncutProblems(sight(func(s *seen) { wrongText(s); wrong(s) })), name)
	}
}

func TestEachRoundOfChatsHasPicturesOfItsOwn(t *testing.T) {
	pictures := map[string]bool{}
	number := 0
	for round := range 2 {
		for _, l := range looks(round) {
			number += l.images
			body := l.question.body()
			content := body["messages"].([]any)[0].(map[string]any)["content"].([]any)
			for _, part := range content[:len(content)-1] {
				address := part.(map[string]any)["image_url"].(map[string]string)["url"]
				raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(address, "data:image/png;base64,"))
				require.NoError(t, err)
				_, err = png.Decode(bytes.NewReader(raw))
				require.NoError(t, err)
				pictures[address] = true
			}
		}
	}
	assert.Len(t, pictures, number)
}
