# SPDX-License-Identifier: Apache-2.0
"""Announces an engine as vLLM's MoRIIOConnector does (kv_connector/v1/moriio): a DEALER socket without an identity of its own says HELLO,
then sends a msgpack map, over and over.

Reads one JSON object from standard input, then announces until the input ends or changes what it says by a further object a line:

    proxy    host:port of the ROUTER
    message  the map to send
    every    seconds between two (3)
"""

import json
import select
import sys

import msgspec
import zmq


def main() -> None:
    want = json.loads(sys.stdin.readline())
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        if ":" in want["proxy"].rsplit(":", 1)[0]:
            socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect("tcp://" + want["proxy"])
        socket.send(msgspec.msgpack.encode({"type": "HELLO"}))
        while True:
            socket.send(msgspec.msgpack.encode(want["message"]))
            if select.select([sys.stdin], [], [], want.get("every", 3))[0]:
                line = sys.stdin.readline()
                if not line:
                    break
                want.update(json.loads(line))
    context.term()


main()
