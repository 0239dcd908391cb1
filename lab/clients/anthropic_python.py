# SPDX-License-Identifier: Apache-2.0
"""Asks with Anthropic's library for Python: a question a line, an answer a line, as README.md says."""
import functools
import json
import sys

import anthropic


def messages(client, q):
    more = {}
    if q["tools"]:
        more["tools"] = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in q["tools"]]
        more["tool_choice"] = {"type": "any"}
    if q["schema"]:
        more["output_config"] = {"format": {"type": "json_schema", "schema": q["schema"]}}
    request = {"model": q["model"], "max_tokens": q["limit"], "messages": [{"role": "user", "content": q["prompt"]}]}
    if not q["stream"]:
        return client.messages.create(**request, **more)
    with client.messages.stream(**request, **more) as stream:
        text = ""
        for i, event in enumerate(stream):
            if q["leave"] and i == q["leave"]:
                return None
            if event.type == "text":
                text += event.text
        message = stream.get_final_message()
    if text != "".join(b.text for b in message.content if b.type == "text"):
        raise ValueError("the pieces are not the whole")
    return message


@functools.cache
def library(url, timeout):
    return anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0, timeout=timeout)


for line in sys.stdin:
    q, said = json.loads(line), {}
    client = library(q["url"], q["timeout"])
    try:
        if m := messages(client, q):
            u = m.usage
            said = {
                "texts": ["".join(b.text for b in m.content if b.type == "text")],
                "calls": [
                    {"name": b.name, "arguments": json.dumps(b.input)} for b in m.content if b.type == "tool_use"
                ],
                "finish": [m.stop_reason],
                "usage": [u.input_tokens + u.cache_read_input_tokens + u.cache_creation_input_tokens, u.output_tokens],
            }
    except Exception as e:  # which one is what the tests ask
        said["error"] = {"class": type(e).__name__, "status": getattr(e, "status_code", 0), "message": str(e)}
        if isinstance(getattr(e, "body", None), dict):
            said["error"]["type"] = e.body["error"]["type"]
    print(json.dumps(said), flush=True)
