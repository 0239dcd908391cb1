"""Records the KV-cache events of an engine that runs, for tests: what its sockets say, byte for byte and frame for frame.

    record.py HTTP_URL EVENTS_PORT REPLAY_PORT > FILE

The output is one JSON object: "version", "sources" (GET /kv_event_sources), "requests" (each prompt's length in tokens and what
the response says of cached tokens), "live" and "replay" (messages of hexadecimal frames; each replay has the batch that it was asked
for), and "wire": the bytes of the PUB socket as a subscriber gets them, from its greeting on. Prompts are made up here.
"""
import json
import socket
import struct
import sys
import threading
import time
import urllib.request

import zmq

URL, EVENTS, REPLAY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def get(path):
    with urllib.request.urlopen(URL + path) as r:
        return json.load(r)


def complete(prompt, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, **more}
    r = urllib.request.Request(URL + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(r) as answer:
        usage = json.load(answer)["usage"]
    return {"prompt": prompt, "more": more, "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens")}


context = zmq.Context()
complete("Before anybody listens, " * 6)

sub = context.socket(zmq.SUB)
sub.subscribe(b"")
sub.connect(f"tcp://127.0.0.1:{EVENTS}")

wire = bytearray()
raw = socket.create_connection(("127.0.0.1", EVENTS))
raw.settimeout(0.2)
for part in (b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48), b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB",
             b"\x00\x01\x01"):
    raw.sendall(part)
    time.sleep(0.2)
done = threading.Event()


def read():
    while not done.is_set():
        try:
            wire.extend(raw.recv(1 << 16))
        except TimeoutError:
            pass


reader = threading.Thread(target=read)
reader.start()
time.sleep(1)

long = "The quick brown fox jumps over the lazy dog. "
requests = [complete(long * 4), complete(long * 4), complete(long * 4 + "And then some more of it. " * 3),
            complete(long * 4, cache_salt="salt"),
            complete(long * 4, vllm_xargs={"kv_cache_report_mode": "full"})]
requests += [complete(f"{i:03d} " + long * 18) for i in range(16)]  # more than the cache holds: blocks are evicted
time.sleep(1)
live = []
while sub.poll(500):
    live.append([f.hex() for f in sub.recv_multipart()])
raw.sendall(b"\x04\x0a\x04PING\x00\x00abc")
time.sleep(0.5)
done.set()
reader.join()


def replay(start):
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{REPLAY}")
    dealer.send_multipart([b"", struct.pack(">Q", start)])
    answers = []
    while dealer.poll(2000):
        frames = dealer.recv_multipart()
        answers.append([f.hex() for f in frames])
        if b"\xff" * 8 in frames:
            break
    dealer.close(0)
    return {"from": start, "answers": answers}


json.dump({"version": get("/version")["version"], "sources": get("/kv_event_sources"), "requests": requests, "live": live,
           "replay": [replay(0), replay(3), replay(10_000_000)], "wire": wire.hex()}, sys.stdout, indent=1)
print()
context.destroy(0)
