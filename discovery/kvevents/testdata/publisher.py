"""Publishes KV-cache events with libzmq, in the order of steps of vLLM 0.32.0's publisher thread: it looks at the ROUTER, then
publishes what is queued; an idle one looks at the ROUTER ten times a second.

Commands come as lines of JSON: {"publish": n}, {"skip": n} (kept for a replay, and sent to nobody), {"send": hex} (this payload),
{"hwm": n} before the first, {"end": true}. The first line that is printed has the ports.
"""
import json
import struct
import sys
import threading
import time
from collections import deque
from queue import Empty, Queue

import zmq

options = json.loads(sys.argv[1])
context = zmq.Context()
queue, kept = Queue(), deque(maxlen=options.get("steps", 10000))
topic = options.get("topic", "").encode()

router = context.socket(zmq.ROUTER)
if options.get("sndhwm"):
    router.setsockopt(zmq.SNDHWM, options["sndhwm"])
replay_port = router.bind_to_random_port("tcp://127.0.0.1")
pub = context.socket(zmq.PUB)
pub.set_hwm(options.get("hwm", 100000))
if options.get("connect"):
    pub.connect(options["connect"])
    port = 0
else:
    port = pub.bind_to_random_port("tcp://127.0.0.1")
print(json.dumps({"events": port, "replay": replay_port}), flush=True)


def replay():
    frames = router.recv_multipart()
    if len(frames) != 3:
        return
    client, _, start = frames
    for seq, payload in kept:
        if seq >= struct.unpack(">Q", start)[0]:
            answer = [client, b"", seq.to_bytes(8, "big"), payload]
            router.send_multipart(answer if options.get("old") else answer[:2] + [topic] + answer[2:])
    end = [client, b"", (-1).to_bytes(8, "big", signed=True), b""]
    router.send_multipart(end if options.get("old") else end[:2] + [b""] + end[2:])


def publisher():
    seq = 0
    while True:
        if router.poll(0):
            replay()
        try:
            kind = queue.get(timeout=0.1)
        except Empty:
            continue
        if kind == "end":
            return
        payload = b"a%d" % seq + b"." * options.get("size", 0)
        if kind not in ("publish", "skip"):
            payload = bytes.fromhex(kind)
        if kind != "skip":
            pub.send_multipart([topic, seq.to_bytes(8, "big"), payload])
        kept.append((seq, payload))
        seq += 1


thread = threading.Thread(target=publisher)
thread.start()
for line in sys.stdin:
    command = json.loads(line)
    for kind in ("publish", "skip"):
        for _ in range(command.get(kind, 0)):
            queue.put(kind)
            if command.get("pause"):
                time.sleep(command["pause"])
    if command.get("send"):
        queue.put(command["send"])
    if command.get("end"):
        break
queue.put("end")
thread.join()
context.destroy(linger=0)
