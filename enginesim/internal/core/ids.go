// SPDX-License-Identifier: Apache-2.0

package core

import (
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
)

// RandomHex gives 1 to 8 random bytes in hexadecimal digits.
func RandomHex(bytes int) string {
	const word = 8
	var b [word]byte
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	return hex.EncodeToString(b[:min(bytes, word)])
}

// NewUUID gives a random UUID.
func NewUUID() string {
	var b [16]byte
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// Silent is a log that drops net/http's complaints about broken connections: scripted faults break them on purpose.
func Silent() *log.Logger { return log.New(io.Discard, "", 0) }
