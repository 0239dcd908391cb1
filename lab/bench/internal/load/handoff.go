// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"strconv"
)

const (
	bytesPerToken  = 4  // of English text, about
	tokensPerBlock = 16 // vLLM's default block size
	windowBlocks   = 16 // most blocks that the group of the layers with a sliding window keeps
	blockIDWidth   = 6  // a block id of five digits and its comma
)

// numberName begins the member that makes a handoff unique. No proxy knows the member, and its value is above 2^53.
const numberName = `"x_number":`

// blockIDs are the ids of a prompt's KV blocks as text, one id per 16 tokens. The text holds all of them twice. Each
// handoff copies a part of the text that begins at another id. To format 16,384 numbers for each prompt of 1 MB would
// slow the load down.
type blockIDs struct {
	text   []byte
	count  int
	tokens int
}

func newBlockIDs(size int) blockIDs {
	tokens := size / bytesPerToken
	ids := blockIDs{count: max(1, (tokens+tokensPerBlock-1)/tokensPerBlock), tokens: tokens}
	for i := range 2 * ids.count {
		ids.text = strconv.AppendInt(ids.text, int64(10_000+i%ids.count*7919%90_000), 10)
		ids.text = append(ids.text, ',')
	}
	return ids
}

// appendTo writes n ids that begin at an id chosen by number.
func (ids blockIDs) appendTo(dst []byte, number uint64, n int) []byte {
	from := int(number%uint64(ids.count)) * blockIDWidth
	return append(dst, ids.text[from:from+n*blockIDWidth-1]...)
}

// appendHandoff writes the handoff of vLLM 0.32.0's NixlConnector with all its 14 keys, and two keys more that no proxy
// knows. The value of one has a space, which the proxy must keep. The block ids are those of a model with two groups of
// layers: one with full attention, one with a sliding window.
func appendHandoff(dst []byte, ids blockIDs, serial, number uint64) []byte {
	dst = append(dst, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[`...)
	dst = ids.appendTo(dst, number, ids.count)
	dst = append(dst, `],[`...)
	dst = ids.appendTo(dst, number+1, min(ids.count, windowBlocks))
	dst = append(dst, `]],"remote_engine_id":"e3e63b5c-0c22-4617-8345-a0ce1bca7526","remote_request_id":"chatcmpl-`...)
	dst = appendHex(dst, serial)
	dst = append(dst, `-`...)
	dst = appendHex(dst, number*0x9e3779b97f4a7c15)[:len(dst)+8]
	dst = append(dst, `","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,`+
		`"remote_num_tokens":`...)
	dst = strconv.AppendInt(dst, int64(ids.tokens), 10)
	dst = append(dst, `,"remote_blocks_expiry_time":null,"transfer_mode":"pull",`+
		`"remote_prefill_cached_tokens":0,"x_unknown":{"kept": [1.50,"\u00e9/\/"]},`+numberName...)
	dst = strconv.AppendUint(dst, number, 10)
	return append(dst, '}')
}

// handoffNumber reads the number that makes a handoff unique.
func handoffNumber(handoff []byte) (uint64, bool) {
	at := bytes.LastIndex(handoff, []byte(numberName))
	if at < 0 || handoff[len(handoff)-1] != '}' {
		return 0, false
	}
	return digits(handoff[at+len(numberName) : len(handoff)-1])
}

// appendHex writes 16 hexadecimal digits.
func appendHex(dst []byte, n uint64) []byte {
	const hex = "0123456789abcdef"
	for shift := 60; shift >= 0; shift -= 4 {
		dst = append(dst, hex[n>>shift&15])
	}
	return dst
}
