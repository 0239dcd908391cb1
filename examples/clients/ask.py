# SPDX-License-Identifier: Apache-2.0
"""Asks a gateway with the client libraries of OpenAI and Anthropic, until its input ends.

Each line of the input is a JSON object: "url" (without /v1), "key", "api" (completions, chat or messages), "stream".
For each, it prints one: "text" is what came, "error" the class of the exception that was raised, null for none.
"""
import json
import sys

import anthropic
import openai

PROMPT = "a cat on a mat that " * 40


def openai_text(client, api, stream):
    if api == "completions":
        reply = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, stream=stream)
    else:
        reply = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": PROMPT}], max_tokens=12, stream=stream
        )
    for chunk in reply if stream else [reply]:
        for choice in chunk.choices:
            part = choice.delta if api == "chat" and stream else choice.message if api == "chat" else choice
            yield (part.text if api == "completions" else part.content) or ""


def anthropic_text(client, stream):
    reply = client.messages.create(
        model="tiny", messages=[{"role": "user", "content": PROMPT}], max_tokens=12, stream=stream
    )
    if not stream:
        yield from (block.text for block in reply.content)
        return
    for event in reply:
        if event.type == "content_block_delta":
            yield event.delta.text


def ask(url, key, api, stream):
    text, error = "", None
    try:
        if api == "messages":
            parts = anthropic_text(anthropic.Anthropic(base_url=url, api_key=key, max_retries=0), stream)
        else:
            parts = openai_text(openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0), api, stream)
        for part in parts:
            text += part
    except Exception as e:  # which one is what the tests ask
        error = type(e).__name__
    return {"text": text, "error": error}


for line in sys.stdin:
    print(json.dumps(ask(**json.loads(line))), flush=True)
