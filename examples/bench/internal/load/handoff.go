// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"strconv"
)

// handoffBlocks is how many block ids a handoff names, in each of its two groups.
const handoffBlocks = 16

// numberName begins the member that makes a handoff unique. No proxy knows the member, and its value is above 2^53.
const numberName = `"x_number":`

// appendHandoff writes the handoff of vLLM 0.32.0's NixlConnector with all its 14 keys, and two keys more that no proxy
// knows. The value of one has a space, which the proxy must keep.
func appendHandoff(dst []byte, serial, number uint64) []byte {
	dst = append(dst, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[`...)
	for group := range uint64(2) {
		if group > 0 {
			dst = append(dst, `],[`...)
		}
		for i := range uint64(handoffBlocks) {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = strconv.AppendUint(dst, (number*37+group*1009+i)%9973, 10)
		}
	}
	dst = append(dst, `]],"remote_engine_id":"e3e63b5c-0c22-4617-8345-a0ce1bca7526","remote_request_id":"chatcmpl-`...)
	dst = appendHex(dst, serial)
	dst = append(dst, `-`...)
	dst = appendHex(dst, number*0x9e3779b97f4a7c15)[:len(dst)+8]
	dst = append(dst, `","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,`+
		`"remote_num_tokens":512,"remote_blocks_expiry_time":null,"transfer_mode":"pull",`+
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
