// SPDX-License-Identifier: Apache-2.0

// Package freeport finds ports for servers of tests that cannot be told to listen on port 0.
package freeport

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
)

// The ports lie below those that systems give to clients and to listeners on port 0 (from 32768 on Linux), so that
// nobody else gets one between Find and its server's start, or while the server is down.
const first, count = 12000, 20000

// Find returns the first of n consecutive ports on which nobody listens.
func Find(n int) (int, error) {
	for range 1000 {
		port := first + rand.IntN(count-n) //nolint:gosec // no secret
		if free(port, n) {
			return port, nil
		}
	}
	return 0, errors.New("freeport: of 1,000 ports tried none is free")
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
