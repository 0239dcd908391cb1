// SPDX-License-Identifier: Apache-2.0

package verdict

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/tidwall/gjson"
)

// Fault is what a client may know of an engine's error response. The other members of the response are the engine's
// own business. Type, Param and Code are nil if the engine left them out.
type Fault struct {
	Code    any    `json:"code"`
	Message string `json:"message"`
	Param   any    `json:"param"`
	Type    any    `json:"type"`

	Anthropic bool `json:"-"` // the engine wrote an error of Anthropic's API
}

// FaultOf reads an engine's error response: {"error":{…}}, vLLM's older {"object":"error",…} or {"error":"…"}. It
// replaces URLs, addresses and host names in all texts; known reports that a word is an engine's host. The result is
// nil if the response is not a JSON object with a message.
func FaultOf(body []byte, known func(host string) bool) *Fault {
	if !gjson.ValidBytes(body) {
		return nil
	}
	top := gjson.ParseBytes(body)
	e, message := top, top.Get("message")
	if inner := top.Get("error"); inner.IsObject() {
		e, message = inner, inner.Get("message")
	} else if inner.Type == gjson.String {
		message = inner
	}
	if !top.IsObject() || message.Type != gjson.String || message.Str == "" {
		return nil
	}
	value := func(name string) any {
		switch v := e.Get(name); v.Type {
		case gjson.String:
			return withoutAddresses(v.Str, known)
		case gjson.Number:
			return v.Num
		}
		return nil
	}
	return &Fault{Message: withoutAddresses(message.Str, known), Type: value("type"), Param: value("param"),
		Code: value("code"), Anthropic: e.Raw != top.Raw && top.Get("type").Str == "error"}
}

const replaced = "(address)"

var (
	urls = regexp.MustCompile(`[A-Za-z][A-Za-z0-9+.-]*://[^\s"'<>(){}]*`)
	// Not bounded by words: a request ID of p2pnccl or moriio has addresses within.
	v4    = regexp.MustCompile(`\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?`)
	v6    = regexp.MustCompile(`\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%\w+)?(?:\]:\d+|\])?`)
	named = regexp.MustCompile(`(?i)(\bhost(?:name)?['"]?\s*[=:]\s*['"]?)[\w.-]+`)
	words = regexp.MustCompile(`\w(?:[\w.-]*\w)?(?::\d+\b)?`)
)

// suffixes are last labels of host names that stand in no engine's text for something else. Without this list
// messages.0.content and torch.cuda would look like hosts.
var suffixes = strings.Fields("local localdomain localhost internal svc lan corp intranet private arpa example test " +
	"invalid com net org edu gov io ai dev cloud app cn de eu uk us")

// withoutAddresses replaces what tells a client where an engine or its peer is. A text that only looks like an address
// may be replaced with it.
func withoutAddresses(text string, known func(host string) bool) string {
	text = urls.ReplaceAllLiteralString(text, replaced)
	text = v4.ReplaceAllLiteralString(text, replaced)
	text = v6.ReplaceAllStringFunc(text, func(s string) string {
		address, _, _ := strings.Cut(strings.TrimPrefix(s, "["), "]")
		for _, a := range []string{address, strings.TrimRight(address, ":.")} { // a sentence goes on, or ends
			if _, err := netip.ParseAddr(a); err == nil && strings.ContainsAny(a, "0123456789") { // not std::bad
				return replaced + address[len(a):]
			}
		}
		return s
	})
	text = named.ReplaceAllString(text, "${1}"+replaced)
	return words.ReplaceAllStringFunc(text, func(s string) string {
		name, port, _ := strings.Cut(strings.ToLower(s), ":")
		label := name[strings.LastIndexByte(name, '.')+1:]
		switch dotted := len(label) < len(name); {
		case known(name), name == "localhost", dotted && slices.Contains(suffixes, label):
			return replaced
		case port != "" && (dotted || len(port) >= 3) && !strings.Contains(name, "_") &&
			strings.ContainsFunc(name, func(r rune) bool { return r >= 'a' && r <= 'z' }):
			return replaced
		}
		return s
	})
}
