// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
)

// leg is a request that an engine has checked.
type leg struct {
	slot    int
	serial  uint64
	handoff []byte // decode only: a view of the body
}

// checker reads the legs of one connection, and reuses its memory for the next leg.
type checker struct {
	board   *Board
	members []member
	nested  []member
}

// check compares a leg with the client's request. Each member must be the client's, byte for byte, or what the NIXL
// pull protocol requires in its place. No member may be missing or come twice. On a board that compares by meaning, a
// member may be spelled in another way, and others may be added.
func (c *checker) check(body []byte, prefill bool) (leg, error) {
	prompt := c.board.prompt.Load()
	if prompt == nil {
		return leg{}, errors.New("a leg came while no client is at work")
	}
	var l leg
	recognised := false
	var err error
	c.members, err = scanObject(c.members[:0], body, func(name, rest []byte) int {
		if string(name) != "messages" {
			return 0
		}
		var length int
		l.serial, length = c.recognise(prompt, rest, prefill)
		recognised = length > 0
		return length
	})
	if err != nil {
		return leg{}, err
	}
	if !recognised && c.board.byMeaning {
		if l.serial, err = c.learn(prompt, prefill); err != nil {
			return leg{}, err
		}
	} else if !recognised {
		return leg{}, errors.New("the prompt is not byte for byte what the client sent")
	}
	if err := c.rules(&l, prompt, prefill); err != nil {
		return leg{}, err
	}
	if l.slot < 0 || l.slot >= Slots || c.board.slots[l.slot].serial.Load() != l.serial {
		return leg{}, fmt.Errorf("prompt %d is not what client %d is asking now", l.serial, l.slot)
	}
	return l, nil
}

// recognise returns the serial number and the length of messages that are spelled as expected, and the length 0 for
// others.
func (c *checker) recognise(prompt *Prompt, rest []byte, prefill bool) (serial uint64, length int) {
	expected := &prompt.spelling
	if c.board.byMeaning {
		expected = c.board.spellingOf(prefill).Load()
		if expected == nil || expected.prompt != prompt {
			return 0, 0
		}
	}
	serial, ok := expected.match(rest)
	if !ok {
		return 0, 0
	}
	return serial, len(expected.messages)
}

// rules checks the members that scanObject found.
func (c *checker) rules(l *leg, prompt *Prompt, prefill bool) error {
	l.slot = -1
	own, transfer := 0, false
	for i, m := range c.members {
		for _, before := range c.members[:i] {
			if string(before.name) == string(m.name) {
				return fmt.Errorf("member %s comes twice", m.name)
			}
		}
		want, fromClient := prompt.fixed[string(m.name)]
		if fromClient {
			own++
		}
		switch string(m.name) {
		case "messages": // scanObject has compared it
		case "user":
			n, ok := digits(m.value[min(len(`"bench-`), len(m.value)):max(len(m.value)-1, 0)])
			if !ok {
				return errors.New("user is not what the client sent")
			}
			l.slot = int(n)
		case "kv_transfer_params":
			transfer = true
			if !prefill {
				l.handoff = m.value
			} else if err := c.asksForDecode(m.value); err != nil {
				return err
			}
		case "max_completion_tokens", "max_tokens":
			if prefill {
				want = "1"
			}
			if !c.same(m.value, want) {
				return fmt.Errorf("%s is %s", m.name, m.value)
			}
		case "stream":
			if prefill {
				want = "false"
			}
			if !c.same(m.value, want) {
				return fmt.Errorf("stream is %s", m.value)
			}
		default:
			if !fromClient && c.board.byMeaning && harmless(m) {
				continue
			}
			if !fromClient || !c.same(m.value, want) || prefill && string(m.name) == "stream_options" {
				return fmt.Errorf("member %s should not be there, or not so", m.name)
			}
		}
	}
	all := len(prompt.fixed)
	if _, has := prompt.fixed["stream_options"]; has && prefill {
		all-- // removed from the prefill leg: vLLM answers 400 if stream is false
	}
	if l.slot < 0 || own != all {
		return errors.New("a member of the client is missing")
	}
	if !transfer {
		return errors.New("there are no kv_transfer_params")
	}
	return nil
}

// asksForDecode checks the transfer parameters of a prefill leg.
func (c *checker) asksForDecode(params []byte) error {
	var err error
	if c.nested, err = scanObject(c.nested[:0], params, nil); err != nil {
		return errors.New("kv_transfer_params is not an object")
	}
	for _, m := range c.nested {
		if string(m.name) == "do_remote_decode" && string(m.value) == "true" {
			return nil
		}
	}
	return errors.New("kv_transfer_params does not ask for a remote decode")
}
