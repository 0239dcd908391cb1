# SPDX-License-Identifier: Apache-2.0
"""Asks with OpenAI's library for Python: a question a line, an answer a line, as README.md says."""
import functools
import json
import sys

import openai


def completions(client, q, said):
    stream = {"stream": True, "stream_options": {"include_usage": True}} if q["stream"] else {}
    reply = client.completions.create(model=q["model"], prompt=q["prompt"], max_tokens=q["limit"], n=q["n"], **stream)
    for chunk in leaving(reply, q) if q["stream"] else [reply]:
        for choice in chunk.choices:
            said.text(choice.index, choice.text, choice.finish_reason)
        if chunk.usage:
            said.usage = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]


def chat(client, q, said):
    more = {"stream": True, "stream_options": {"include_usage": True}} if q["stream"] else {}
    if q["tools"]:
        more["tools"] = [{"type": "function", "function": tool} for tool in q["tools"]]
        more["tool_choice"] = "required"
    if q["schema"]:
        form = {"name": "answer", "schema": q["schema"]}
        more["response_format"] = {"type": "json_schema", "json_schema": form}
    reply = client.chat.completions.create(
        model=q["model"], messages=[{"role": "user", "content": q["prompt"]}], max_tokens=q["limit"], n=q["n"], **more
    )
    for chunk in leaving(reply, q) if q["stream"] else [reply]:
        for choice in chunk.choices:
            part = choice.delta if q["stream"] else choice.message
            said.text(choice.index, part.content, choice.finish_reason)
            for i, call in enumerate(part.tool_calls or []):
                said.call(call.index if q["stream"] else i, call.function.name, call.function.arguments)
        if chunk.usage:
            said.usage = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]


def responses(client, q, said):
    more = {}
    if q["tools"]:
        more["tools"] = [{"type": "function", "strict": True, **tool} for tool in q["tools"]]
        more["tool_choice"] = "required"
    if q["schema"]:
        more["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": q["schema"]}}
    reply = client.responses.create(
        model=q["model"], input=q["prompt"], max_output_tokens=q["limit"], stream=q["stream"], **more
    )
    text = ""
    for event in leaving(reply, q) if q["stream"] else []:
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.function_call_arguments.delta":
            said.call(event.output_index, None, event.delta)
        elif event.type == "response.output_item.added" and event.item.type == "function_call":
            said.call(event.output_index, event.item.name, "")
        elif event.type == "response.completed":
            reply = event.response
    if q["leave"]:
        return
    if q["stream"] and text != reply.output_text:
        raise ValueError("the pieces are not the whole")
    said.text(0, reply.output_text, reply.status)
    said.usage = [reply.usage.input_tokens, reply.usage.output_tokens]
    for i, item in enumerate([] if q["stream"] else reply.output):
        if item.type == "function_call":
            said.call(i, item.name, item.arguments)


def leaving(stream, q):
    """Goes through a stream, and leaves it after so many events."""
    for i, event in enumerate(stream):
        if q["leave"] and i == q["leave"]:
            stream.close()
            return
        yield event


class Said:
    def __init__(self):
        self.texts, self.finish, self.calls, self.usage, self.error = {}, {}, {}, None, None

    def text(self, index, text, finish):
        self.texts[index] = self.texts.get(index, "") + (text or "")
        self.finish[index] = finish or self.finish.get(index)

    def call(self, index, name, arguments):
        call = self.calls.setdefault(index, {"name": name, "arguments": ""})
        call["arguments"] += arguments or ""

    def line(self):
        lists = {name: [v for _, v in sorted(getattr(self, name).items())] for name in ("texts", "finish", "calls")}
        return json.dumps({**lists, "usage": self.usage, "error": self.error})


@functools.cache
def library(url, timeout):
    return openai.OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0, timeout=timeout)


for line in sys.stdin:
    q, said = json.loads(line), Said()
    client = library(q["url"], q["timeout"])
    try:
        {"completions": completions, "chat": chat, "responses": responses}[q["api"]](client, q, said)
    except Exception as e:  # which one is what the tests ask
        said.error = {"class": type(e).__name__, "status": getattr(e, "status_code", 0), "message": str(e)}
    print(said.line(), flush=True)
