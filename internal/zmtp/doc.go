// SPDX-License-Identifier: Apache-2.0

// Package zmtp is the little of ZMTP 3.0 (rfc.zeromq.org/spec/23, mechanism NULL) that a bound socket needs which only
// reads: PULL, or a ROUTER that answers nobody.
//
// The library for ZeroMQ is not used here, for it trusts its peers: its accept loop shakes hands with one peer after
// the other, without a limit of time, so that a port scanner stops all messages; and it allocates what a frame's header
// announces, so that nine bytes end the process (go-zeromq/zmq4 0.17.0, socket.go and conn.go). Here each peer is
// served by itself, within limits of time, size and number. The tests send with that library and with libzmq.
package zmtp
