// SPDX-License-Identifier: Apache-2.0

package verdict

import (
	"encoding/json"
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

// Private are the names that no client may read in an engine's text.
type Private struct {
	Engine func(word string) bool          // reports whether a word, in lower case, names an engine
	Models func(text, asked string) string // puts clients' names of models in place of engines'; nil: they are the same
	Asked  string                          // by which name the client asked for its model
}

// FaultOf reads an engine's error response: {"error":{…}}, vLLM's older {"object":"error",…} or {"error":"…"}. It
// replaces URLs, addresses, host names, paths and private names in all texts. The result is nil if the response is not
// a JSON object with a message.
func FaultOf(body []byte, private Private) *Fault {
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
			return private.hide(v.Str)
		case gjson.Number:
			return v.Num
		}
		return nil
	}
	return &Fault{Message: private.hide(message.Str), Type: value("type"), Param: value("param"),
		Code: value("code"), Anthropic: e.Raw != top.Raw && top.Get("type").Str == "error"}
}

// failedMessage is where response.failed of the Responses API has an engine's text.
const failedMessage = "response.error.message"

// Failed returns the data of an event response.failed as clients may read it, nil for another event: see FaultOf.
func Failed(data []byte, private Private) []byte {
	message := gjson.GetBytes(data, failedMessage)
	if message.Type != gjson.String || message.Index == 0 {
		return nil
	}
	text, _ := json.Marshal(private.hide(message.Str)) // of a string
	return slices.Concat(data[:message.Index], text, data[message.Index+len(message.Raw):])
}

const replaced = "(address)"

var (
	urls = regexp.MustCompile(`[A-Za-z][A-Za-z0-9+.-]*://[^\s"'<>(){}]*`)
	// What a name of the set may be: an ID may have slashes, colons and a port.
	ids  = regexp.MustCompile(`\w(?:[\w./:@~+-]*\w)?`)
	port = regexp.MustCompile(`:\d+$`)
	// A path of the engine's machine: from the root, two names or more.
	paths = regexp.MustCompile("(?:^|[\\s\"'`(\\[<=:,])/(?:[\\w.@+~-]+/)+[\\w.@+~-]*\\w/?")
	// Not bounded by words: a request ID of p2pnccl or moriio has addresses within.
	v4       = regexp.MustCompile(`\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?`)
	v6       = regexp.MustCompile(`\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%\w+)?(?:\]:\d+|\])?`)
	named    = regexp.MustCompile(`(?i)(\bhost(?:name)?['"]?\s*[=:]\s*['"]?)[\w.-]+`)
	words    = regexp.MustCompile(`\w(?:[\w.-]*\w)?(?::\d+\b)?`)
	behindV6 = regexp.MustCompile(`^\]?(?::\d+)?`)
	// A name of Compose's: the number of an instance follows, which that of no member does.
	numbered = regexp.MustCompile(`_\d+$`)
)

// suffixes are last labels of host names that stand in no engine's text for something else. Without this list
// messages.0.content and torch.cuda would look like hosts.
var suffixes = strings.Fields("local localdomain localhost internal svc lan corp intranet private arpa example test " +
	"invalid com net org edu gov io ai dev cloud app cn de eu uk us")

// served are how paths begin that a client knows: where engines serve, and the members of a body.
var served = strings.Fields("v1 v2 inference generate tokenize detokenize score rerank pooling body messages input " +
	"prompt tools")

// maxText is how much of a text is searched and passed on, in bytes.
const maxText = 64 << 10

// hide replaces what is private in a text. Models go first: the name of one may look like a path.
func (p *Private) hide(text string) string {
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + " …"
	}
	if p.Models != nil {
		text = p.Models(text, p.Asked)
	}
	return withoutAddresses(text, p.Engine)
}

// withoutAddresses replaces what tells a client where an engine or its peer is. A text that only looks like an address
// may be replaced with it.
func withoutAddresses(text string, known func(name string) bool) string {
	text = urls.ReplaceAllLiteralString(text, replaced)
	text = ids.ReplaceAllStringFunc(text, func(s string) string {
		name := strings.ToLower(s)
		if strings.ContainsAny(s, "/:@~+") && (known(name) || known(port.ReplaceAllLiteralString(name, ""))) {
			return replaced
		}
		return s // words finds a shorter name in it
	})
	text = paths.ReplaceAllStringFunc(text, func(s string) string {
		before, path, _ := strings.Cut(s, "/")
		if first, _, _ := strings.Cut(path, "/"); slices.Contains(served, first) {
			return s
		}
		return before + replaced
	})
	text = v4.ReplaceAllLiteralString(text, replaced)
	text = v6.ReplaceAllStringFunc(text, func(s string) string { return withoutV6(s, known) })
	text = named.ReplaceAllString(text, "${1}"+replaced)
	return words.ReplaceAllStringFunc(text, func(s string) string {
		name, number, _ := strings.Cut(strings.ToLower(s), ":")
		label := name[strings.LastIndexByte(name, '.')+1:]
		switch dotted := len(label) < len(name); {
		case known(name), name == "localhost", dotted && slices.Contains(suffixes, label):
			return replaced
		case number != "" && (dotted || len(number) >= 3) &&
			(!strings.Contains(name, "_") || len(number) >= 4 && numbered.MatchString(name)) &&
			strings.ContainsFunc(name, func(r rune) bool { return r >= 'a' && r <= 'z' }):
			return replaced
		}
		return s
	})
}

// maxV6 is longer than any IPv6 address in text, with its zone.
const maxV6 = 64

// withoutV6 replaces the IPv6 addresses in a text of hexadecimal numbers and colons, with the port that may follow. A
// word and a colon may stand before one, and a sentence may go on or end behind it.
func withoutV6(s string, known func(name string) bool) string {
	var out strings.Builder
	for at := 0; at < len(s); {
		if at > 0 && s[at-1] != ':' && s[at-1] != '[' || s[at] == '[' {
			out.WriteByte(s[at])
			at++
			continue
		}
		n := v6Length(s[at:min(len(s), at+maxV6)], known)
		if n == 0 {
			out.WriteByte(s[at])
			at++
			continue
		}
		out.WriteString(replaced)
		at += n + len(behindV6.FindString(s[at+n:]))
	}
	return strings.ReplaceAll(out.String(), "["+replaced, replaced)
}

// v6Length returns how long the address is with which s begins, 0 if it begins with none.
func v6Length(s string, known func(name string) bool) int {
	for n := len(s); n > 1; n-- {
		if n < len(s) && !strings.Contains(":.]", s[n:n+1]) {
			continue
		}
		a, err := netip.ParseAddr(s[:n])
		if err == nil && (strings.ContainsAny(s[:n], "0123456789") || known(a.String())) { // not std::bad
			return n
		}
	}
	return 0
}
