// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// shape is what a client's code can rely on in a response: each path in it, like "choices[].index", with the types
// found there. Elements of an array share one path. Values are no part of it, except the few words that say what kind
// of thing an object is.
type shape map[string]string

// kinds are the members whose strings belong to the shape.
var kinds = []string{"object", "type", "role", "status", "finish_reason", "stop_reason", "transfer_mode"}

// unread are headers that say nothing about the engine's protocol.
var unread = []string{"connection", "content-length", "date", "transfer-encoding"}

func shapeOf(r *recordedResponse) shape {
	if r == nil {
		return shape{"status": "none"}
	}
	s := shape{"status": strconv.Itoa(r.Status)}
	for name, value := range r.Headers {
		switch name = strings.ToLower(name); {
		case slices.Contains(unread, name):
		case name == "content-type":
			s.add("header content-type", strings.ToLower(value))
		default:
			s.add("header "+name, "string")
		}
	}
	switch {
	case r.SSELines != nil:
		s.addStream(r.SSELines)
	case r.Body != nil:
		var body any
		if json.Unmarshal(r.Body, &body) != nil {
			s.add("body", "no JSON")
		}
		s.walk("body", body)
	default:
		s.add("body", "text")
	}
	return s
}

// addStream tells the first event and the last before [DONE] from those between, whose number varies.
func (s shape) addStream(lines []string) {
	var events []any
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ": ")
		var event any
		switch {
		case line == "":
		case name != "data":
			s.add("stream "+name, value)
		case json.Unmarshal([]byte(value), &event) == nil:
			events = append(events, event)
		default:
			s.add("stream ends with", value)
		}
	}
	for i, event := range events {
		switch i {
		case 0:
			s.walk("first event", event)
		case len(events) - 1:
			s.walk("last event", event)
		default:
			s.walk("middle events", event)
		}
	}
}

func (s shape) walk(path string, value any) {
	switch value := value.(type) {
	case nil:
		s.add(path, "null")
	case bool:
		s.add(path, "boolean")
	case float64:
		s.add(path, "number")
	case string:
		if slices.Contains(kinds, path[strings.LastIndexByte(path, '.')+1:]) {
			s.add(path, fmt.Sprintf("%q", value))
		} else {
			s.add(path, "string")
		}
	case []any:
		s.add(path, "array")
		for _, element := range value {
			s.walk(path+"[]", element)
		}
	case map[string]any:
		s.add(path, "object")
		for name, member := range value {
			s.walk(path+"."+name, member)
		}
	}
}

// add notes one more type at a path.
func (s shape) add(path, kind string) {
	var types []string
	if s[path] != "" {
		types = strings.Split(s[path], " or ")
	}
	if !slices.Contains(types, kind) {
		types = append(types, kind)
		slices.Sort(types)
	}
	s[path] = strings.Join(types, " or ")
}

// changes lists what differs in the second shape, ordered by path. Where an error took the place of a success, or no
// response that of one, it lists only the status.
func changes(recorded, now shape) (list []string) {
	if before, after := recorded["status"], now["status"]; before[:1] != after[:1] {
		return []string{fmt.Sprintf("type   status: %s, was %s", after, before)}
	}
	all := maps.Clone(recorded)
	maps.Copy(all, now)
	for _, path := range slices.Sorted(maps.Keys(all)) {
		before, wasThere := recorded[path]
		after, isThere := now[path]
		switch {
		case !wasThere:
			list = append(list, fmt.Sprintf("added  %s: %s", path, after))
		case !isThere:
			list = append(list, fmt.Sprintf("gone   %s: %s", path, before))
		case before != after:
			list = append(list, fmt.Sprintf("type   %s: %s, was %s", path, after, before))
		}
	}
	return list
}
