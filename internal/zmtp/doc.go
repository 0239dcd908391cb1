// SPDX-License-Identifier: Apache-2.0

// Package zmtp has the part of ZMTP 3.0 (rfc.zeromq.org/spec/23, mechanism NULL) that a gateway needs: a bound socket
// which only reads, PULL, or a ROUTER that never responds ([Listener]), and connections whose messages have several
// frames ([Conn]): a SUB socket, connecting or bound, and a DEALER.
//
// The package does not use the ZeroMQ library (go-zeromq/zmq4 0.17.0, socket.go and conn.go), since that library trusts
// its peers. Its accept loop does one handshake after the other without a time limit, so a port scanner stops all
// messages. It also allocates as much memory as a frame's header announces, so nine bytes end the process. Its
// reconnecting races with Close. This package serves each peer in a goroutine of its own, within limits of time, size
// and number; it connects when it is told to, and leaves it to the caller when to do so again. The tests send with that
// library and with libzmq.
package zmtp
