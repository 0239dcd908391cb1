// SPDX-License-Identifier: Apache-2.0

// Package freeport finds ports for servers of tests that cannot be told to listen on port 0.
package freeport

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// The ports lie below those that systems give to clients and to listeners on port 0 (from 32768 on Linux), so that
// nobody else gets one between Find and its server's start, or while the server is down.
const first, count = 12000, 20000

// block is how many ports a process takes for itself at once, so that those of tests that run beside each other do not
// meet. It listens at the block's first port as long as it runs.
const block = 50

var mine struct {
	sync.Mutex
	next, end int // ports of the block that are not given away
	locks     []net.Listener
}

// Find returns the first of n consecutive ports on which nobody listens; n is below 50. No port is returned twice, and
// none that another process has from Find.
func Find(n int) (int, error) {
	if n < 1 || n >= block {
		return 0, errors.New("freeport: only 1 to 49 ports can be had at once")
	}
	mine.Lock()
	defer mine.Unlock()
	for range 1000 {
		if mine.end-mine.next < n && !claim() {
			continue
		}
		port := mine.next
		mine.next += n
		if free(port, n) {
			return port, nil
		}
	}
	return 0, errors.New("freeport: of 1,000 ports tried none is free")
}

// claim takes another block, unless somebody has it.
func claim() bool {
	lock := first + block*rand.IntN(count/block)
	ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(lock)))
	if err != nil {
		return false
	}
	mine.locks = append(mine.locks, ln)
	mine.next, mine.end = lock+1, lock+block
	return true
}

// One is Find(1), as text.
func One() (string, error) {
	port, err := Find(1)
	return strconv.Itoa(port), err
}

func free(port, n int) bool {
	for i := range n {
		for _, host := range []string{"", "127.0.0.1"} { // who listens at one of them need not be in the other's way
			ln, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port+i)))
			if err != nil {
				return false
			}
			_ = ln.Close()
		}
	}
	return true
}
