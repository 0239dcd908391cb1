// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/tidwall/gjson"
)

// said is what a response of any API says, whole or streamed.
type said struct {
	text   string
	end    string // finish_reason, stop_reason or status, where it is told
	events int
	whole  bool // it came to its own end: the whole document, or the stream's last event
	failed bool // it tells an error after its first byte
}

// read reads a response with status 200.
func read(path, body string, streamed bool) said {
	var s said
	var text strings.Builder
	if !streamed {
		doc := gjson.Parse(body)
		s.whole = gjson.Valid(body) && doc.IsObject()
		s.take(&text, doc)
		s.text = text.String()
		return s
	}
	for line := range strings.Lines(body) {
		data, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "data: ")
		if !ok {
			continue
		}
		s.events++
		if data == "[DONE]" {
			s.whole = true
			continue
		}
		event := gjson.Parse(data)
		switch kind := event.Get("type").String(); {
		case event.Get("error").IsObject() || kind == "error" || kind == "response.failed":
			s.failed = true
		case kind == "message_stop", kind == "response.completed", kind == "response.incomplete":
			s.whole = true
			s.note(event.Get("response"))
		case path == "/generate": // each event has the whole text so far
			text.Reset()
			s.take(&text, event)
		case strings.HasPrefix(kind, "response."):
			if kind == "response.output_text.delta" {
				text.WriteString(event.Get("delta").String())
			}
		default:
			s.take(&text, event)
		}
	}
	s.text = text.String()
	return s
}

// take adds the text of a document, by the members in which the APIs keep it.
func (s *said) take(text *strings.Builder, doc gjson.Result) {
	s.note(doc)
	for _, list := range []string{"choices", "output", "content"} {
		if items := doc.Get(list); items.IsArray() {
			for _, item := range items.Array() {
				s.take(text, item)
			}
		}
	}
	for _, member := range []string{"message", "delta"} {
		if v := doc.Get(member); v.IsObject() {
			s.take(text, v)
		}
	}
	if list := doc.Get("content"); !list.IsArray() && list.Type == gjson.String {
		text.WriteString(list.String())
	}
	if v := doc.Get("text"); v.Type == gjson.String {
		text.WriteString(v.String())
	} else if ids := doc.Get("token_ids"); ids.IsArray() {
		for _, id := range ids.Array() {
			text.WriteByte(byte(id.Int()))
		}
	}
}

func (s *said) note(doc gjson.Result) {
	for _, member := range []string{"finish_reason", "stop_reason", "status", "meta_info.finish_reason.type"} {
		if v := doc.Get(member); v.Type == gjson.String && v.String() != "in_progress" {
			s.end = v.String()
		}
	}
}
