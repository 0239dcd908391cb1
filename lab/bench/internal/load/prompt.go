// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"fmt"
	"strings"
)

// serialDigits is the fixed width of a serial number in a request, so that the next one can be written over it.
const serialDigits = 16

// messageText fills the prompts. It has about as many escapes as code and prose have.
const messageText = `The decode engine reads the blocks that the prefill engine holds.\nIts \"handoff\" names ` +
	`them, and a ` +
	`path like C:\\kv\\blocks or a word like caf\u00e9 must arrive as it was sent. `

// Prompt is a client's request body. It is made once and sent many times: each request has a copy with its own serial
// number, at the prompt's beginning and end, and its client's slot. A Prompt does not change and may be shared.
type Prompt struct {
	spelling // the messages inside body
	body     []byte
	slotAt   int // of the slot's four digits, in body
	msgAt    int // of messages in body
	stream   bool
	fixed    map[string]string // the other members as the client sends them
	blocks   blockIDs          // that the prefill engine makes of it
}

// spelling is one way to write a prompt's messages.
type spelling struct {
	prompt   *Prompt
	messages []byte
	serialAt [2]int // of the two serial numbers, in messages
}

// NewPrompt makes a chat request of about size bytes. Its messages have about 1 KB each, as in a long conversation.
func NewPrompt(size int, stream bool) *Prompt {
	const serial = "0000000000000000"
	options := `,"stream":false}`
	fixed := map[string]string{"model": `"bench"`, "max_tokens": "64", "temperature": "0.5", "stream": "false"}
	if stream {
		options = `,"stream":true,"stream_options":{"include_usage":true}}`
		fixed["stream"], fixed["stream_options"] = "true", `{"include_usage":true}`
	}
	head := `{"user":"bench-0000","messages":`
	tail := `,"model":"bench","max_tokens":64,"temperature":0.5` + options

	var m strings.Builder
	m.WriteString(`[{"role":"system","content":"` + serial + ` `)
	first := m.Len() - 1 - serialDigits
	closing := ` ` + serial + `"}]`
	room := size - len(head) - len(tail) - len(closing)
	for inMessage := 0; m.Len()+len(messageText) <= room; inMessage += len(messageText) {
		if inMessage > 900 {
			m.WriteString(`"},{"role":"user","content":"`)
			inMessage = 0
		}
		m.WriteString(messageText)
	}
	if fill := room - m.Len(); fill > 0 {
		m.WriteString(strings.Repeat("x", fill))
	}
	last := m.Len() + 1
	m.WriteString(closing)

	p := &Prompt{
		body:   []byte(head + m.String() + tail),
		slotAt: len(`{"user":"bench-`),
		msgAt:  len(head),
		stream: stream,
		fixed:  fixed,
		blocks: newBlockIDs(size),
	}
	p.spelling = spelling{prompt: p, messages: p.body[p.msgAt:][:m.Len()], serialAt: [2]int{first, last}}
	return p
}

// Size is the length of the body in bytes.
func (p *Prompt) Size() int { return len(p.body) }

// address writes a slot and a serial number into a copy of the body.
func (p *Prompt) address(body []byte, slot int, serial uint64) {
	copy(body[p.slotAt:], fmt.Appendf(nil, "%04d", slot))
	p.stamp(body, serial)
}

// stamp writes a serial number into a copy of the body.
func (p *Prompt) stamp(body []byte, serial uint64) {
	for _, at := range p.serialAt {
		putDigits(body[p.msgAt+at:][:serialDigits], serial)
	}
}

// match reports whether rest begins with these messages, byte for byte, and returns their serial number.
func (s *spelling) match(rest []byte) (serial uint64, ok bool) {
	if len(rest) < len(s.messages) {
		return 0, false
	}
	rest = rest[:len(s.messages)]
	first, last := s.serialAt[0], s.serialAt[1]
	same := bytes.Equal(rest[:first], s.messages[:first]) &&
		bytes.Equal(rest[first+serialDigits:last], s.messages[first+serialDigits:last]) &&
		bytes.Equal(rest[last+serialDigits:], s.messages[last+serialDigits:]) &&
		bytes.Equal(rest[first:first+serialDigits], rest[last:last+serialDigits])
	if !same {
		return 0, false
	}
	return digits(rest[first : first+serialDigits])
}

func putDigits(dst []byte, n uint64) {
	for i := len(dst) - 1; i >= 0; i-- {
		dst[i] = byte('0' + n%10)
		n /= 10
	}
}

func digits(b []byte) (n uint64, ok bool) {
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return n, len(b) > 0
}
