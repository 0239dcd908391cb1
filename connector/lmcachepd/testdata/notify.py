# SPDX-License-Identifier: Apache-2.0
"""Sends notices as LMCache's prefill engines do: one PUSH socket for each rank, messages encoded by msgspec.

Reads one JSON object from standard input:

    address    of the gateway's listener, host:port
    ids        the requests to tell of
    ranks      how many senders there are, each with a socket of its own (1)
    hold       seconds between connecting and sending (0)
    heartbeat  milliseconds between heartbeats of libzmq, which takes a response that does not come for a dead peer (none)

and writes one: the first message in hexadecimal digits, and how often a connection was lost.
"""

import json
import sys
import time

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message


class ProxyNotif(msgspec.Struct, tag=True):
    req_id: str


def main() -> None:
    want = json.load(sys.stdin)
    context = zmq.Context()
    sockets, monitors = [], []
    for _ in range(want.get("ranks", 1)):
        push = context.socket(zmq.PUSH)
        if "heartbeat" in want:
            push.setsockopt(zmq.HEARTBEAT_IVL, want["heartbeat"])
            push.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * want["heartbeat"])
        monitors.append(push.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        push.connect("tcp://" + want["address"])
        sockets.append(push)
    time.sleep(want.get("hold", 0))
    first = ""
    for req_id in want["ids"]:
        message = msgspec.msgpack.encode(ProxyNotif(req_id=req_id))
        first = first or message.hex()
        for push in sockets:
            push.send(message)
    lost = 0
    for monitor in monitors:
        while monitor.poll(0):
            recv_monitor_message(monitor)
            lost += 1
    for push, monitor in zip(sockets, monitors):
        push.disable_monitor()
        monitor.close(linger=0)
        push.close(linger=10000)
    context.term()
    print(json.dumps({"first": first, "lost": lost}))


main()
