// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPromptsAreJSONOfTheWantedSize(t *testing.T) {
	for _, size := range []int{2 << 10, 16 << 10, 1 << 20} {
		p := NewPrompt(size, true)
		assert.Equal(t, size, p.Size())
		require.True(t, json.Valid(p.body))
		body := append([]byte(nil), p.body...)
		p.address(body, 42, 1234567)
		var sent struct {
			User     string
			Messages []struct{ Content string }
		}
		require.NoError(t, json.Unmarshal(body, &sent))
		assert.Equal(t, "bench-0042", sent.User)
		assert.True(t, strings.HasPrefix(sent.Messages[0].Content, "0000000001234567 "))
		assert.True(t, strings.HasSuffix(sent.Messages[len(sent.Messages)-1].Content, " 0000000001234567"))
	}
}

func TestAPromptRecognisesOnlyItself(t *testing.T) {
	p := NewPrompt(2<<10, false)
	body := append([]byte(nil), p.body...)
	p.stamp(body, 77)
	messages := body[p.msgAt:]
	serial, ok := p.match(messages)
	require.True(t, ok)
	assert.EqualValues(t, 77, serial)
	for at := range len(p.messages) {
		messages[at] ^= 1
		_, ok := p.match(messages)
		require.False(t, ok, "byte %d was changed", at)
		messages[at] ^= 1
	}
}

func TestHandoffsAreJSONWithAllKeysAndABigInteger(t *testing.T) {
	text := appendHandoff(nil, newBlockIDs(2<<10), 5, bigInteger+3)
	var handoff map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(text, &handoff))
	for _, name := range []string{
		"do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
		"remote_host",
		"remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens", "remote_blocks_expiry_time",
		"transfer_mode",
		"remote_prefill_cached_tokens", "x_unknown",
	} {
		assert.Contains(t, handoff, name)
	}
	assert.Equal(t, "9007199254740996", string(handoff["x_number"]))
	number, ok := handoffNumber(text)
	require.True(t, ok)
	assert.EqualValues(t, bigInteger+3, number)
}

func TestHandoffsNameOneBlockPer16TokensOfThePrompt(t *testing.T) {
	for size, blocks := range map[int]int{60: 1, 2 << 10: 32, 128 << 10: 2048, 1 << 20: 16384} {
		ids := newBlockIDs(size)
		var seen []string
		for number := range uint64(3) {
			var handoff struct {
				Groups [][]int `json:"remote_block_ids"`
				Tokens int     `json:"remote_num_tokens"`
			}
			text := appendHandoff(nil, ids, 5, bigInteger+number)
			require.NoError(t, json.Unmarshal(text, &handoff))
			require.Len(t, handoff.Groups, 2)
			assert.Len(t, handoff.Groups[0], blocks)
			assert.Len(t, handoff.Groups[1], min(blocks, windowBlocks))
			assert.Equal(t, size/4, handoff.Tokens)
			group, _, _ := strings.Cut(string(text), "],[")
			if blocks > 1 {
				assert.NotContains(t, seen, group, "two requests have the same block ids")
			}
			seen = append(seen, group)
		}
	}
}

func TestResponsesAreJSON(t *testing.T) {
	b := NewBoard()
	b.Assign(0, &Plan{Prompt: NewPrompt(2<<10, false)})
	assert.True(t, json.Valid(appendPrefill(nil, b, 0, 1)))
	assert.True(t, json.Valid(appendWhole(nil, 1, 2)))
	var e events
	e.reset(1, 2)
	for event := range strings.SplitSeq(string(appendEnd(append([]byte(nil), e.at(3)...), 1, 2, 4)), "\n\n") {
		if data, ok := strings.CutPrefix(event, "data: "); ok && data != "[DONE]" {
			assert.True(t, json.Valid([]byte(data)), data)
		}
	}
}

func TestScanObjectIsStrictAtTheTop(t *testing.T) {
	for body, want := range map[string]string{
		`{}`:                              "",
		` { "a" : 1 , "b":{"c":[1,"}"]}}`: `a=1 b={"c":[1,"}"]} `,
		`{"a":"\\\"","b":-1.5e3}`:         `a="\\\"" b=-1.5e3 `,
		`{"a":1,"a":2}`:                   `a=1 a=2 `,
		``:                                "fault",
		`null`:                            "fault",
		`[1]`:                             "fault",
		`{"a":1}x`:                        "fault",
		`{"a":1,}`:                        "fault",
		`{"a" 1}`:                         "fault",
		`{"a":`:                           "fault",
		`{"a":[1}`:                        "fault",
		`{"a":"x`:                         "fault",
	} {
		members, err := scanObject(nil, []byte(body), nil)
		got := ""
		for _, m := range members {
			got += string(m.name) + "=" + string(m.value) + " "
		}
		if err != nil {
			got = "fault"
		}
		assert.Equal(t, want, got, body)
	}
}

func TestBodiesAreReadByLengthAndByChunks(t *testing.T) {
	for name, c := range map[string]struct{ message, body, fault string }{
		"length": {"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "hello", ""},
		"chunks": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
			"hello", ""},
		"no framing":    {"HTTP/1.1 200 OK\r\n\r\nhello", "", "neither a length nor chunks"},
		"cut length":    {"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel", "", "unexpected EOF"},
		"cut chunk":     {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhe", "", "unexpected EOF"},
		"no last chunk": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "", "unexpected EOF"},
		"chunk too long": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n", "",
			"longer than it says"},
	} {
		t.Run(name, func(t *testing.T) {
			br := bufio.NewReader(strings.NewReader(c.message))
			var h head
			require.NoError(t, h.read(br))
			status, err := h.status()
			require.NoError(t, err)
			assert.Equal(t, 200, status)
			var body strings.Builder
			err = h.each(br, func(piece []byte) error {
				body.Write(piece)
				return nil
			})
			if c.fault != "" {
				require.ErrorContains(t, err, c.fault)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.body, body.String())
		})
	}
}
