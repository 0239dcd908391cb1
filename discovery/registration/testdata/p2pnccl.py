# SPDX-License-Identifier: Apache-2.0
"""Announces an engine as vLLM's P2pNcclConnector does (0.9.2 to 0.22, p2p_nccl_engine.py): a DEALER socket whose identity is the
engine's ZeroMQ address sends a msgpack map, over and over.

Reads one JSON object from standard input, then announces until the input ends or changes what it says by a further object a line:

    proxy     host:port of the ROUTER
    message   the map to send
    every     seconds between two (3)
    identity  of the socket
"""

import json
import select
import sys

import msgspec
import zmq


def main() -> None:
    want = json.loads(sys.stdin.readline())
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if ":" in want["proxy"].rsplit(":", 1)[0]:
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt_string(zmq.IDENTITY, want["identity"])
    socket.connect("tcp://" + want["proxy"])
    while True:
        socket.send(msgspec.msgpack.encode(want["message"]))
        if select.select([sys.stdin], [], [], want.get("every", 3))[0]:
            line = sys.stdin.readline()
            if not line:
                break
            want.update(json.loads(line))
    socket.close(linger=0)
    context.term()


main()
