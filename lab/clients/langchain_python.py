# SPDX-License-Identifier: Apache-2.0
"""Asks with LangChain's ChatOpenAI and OpenAI: a question a line, an answer a line, as README.md says."""
import gc
import json
import sys

import langchain_openai
from langchain_core.messages import HumanMessage


def options(q):
    return {
        "model": q["model"], "base_url": q["url"] + "/v1", "api_key": "secret", "max_retries": 0, "n": q["n"],
        "max_tokens": q["limit"], "timeout": q["timeout"],
    }


def completions(q, said):
    prompts = q["prompt"] if isinstance(q["prompt"], list) else [q["prompt"]]
    model = langchain_openai.OpenAI(**options(q))
    if q["stream"]:
        said["texts"] = ["".join(leaving(model.stream(prompts[0]), q))]
        return
    result = model.generate(prompts)
    all = [g for choices in result.generations for g in choices]
    said["texts"] = [g.text for g in all]
    said["finish"] = [g.generation_info["finish_reason"] for g in all]
    usage = result.llm_output["token_usage"]
    said["usage"] = [usage["prompt_tokens"], usage["completion_tokens"]]


def chat(q, said):
    model = langchain_openai.ChatOpenAI(stream_usage=True, **options(q))
    if q["n"] > 1:
        result = model.generate([[HumanMessage(q["prompt"])]])
        said["texts"] = [g.text for g in result.generations[0]]
        said["finish"] = [g.generation_info["finish_reason"] for g in result.generations[0]]
        usage = result.llm_output["token_usage"]
        said["usage"] = [usage["prompt_tokens"], usage["completion_tokens"]]
        return
    if q["tools"]:
        tools = [{"type": "function", "function": tool} for tool in q["tools"]]
        model = model.bind_tools(tools, tool_choice="required")
    if q["schema"]:
        form = {"title": "answer", "description": "an answer", **q["schema"]}
        parsed = model.with_structured_output(form, method="json_schema", include_raw=True).invoke(q["prompt"])
        message = parsed["raw"]
        if json.loads(message.content) != parsed["parsed"]:
            raise ValueError(parsed["parsing_error"])
    elif q["stream"]:
        message = None
        for chunk in leaving(model.stream(q["prompt"]), q):
            message = chunk if message is None else message + chunk
        if q["leave"]:
            return
    else:
        message = model.invoke(q["prompt"])
    said["texts"] = [message.content]
    said["finish"] = [message.response_metadata["finish_reason"]]
    said["calls"] = [{"name": c["name"], "arguments": json.dumps(c["args"])} for c in message.tool_calls]
    said["usage"] = [message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]]


def leaving(stream, q):
    """Goes through a stream, and leaves it after so many events."""
    for i, event in enumerate(stream):
        if q["leave"] and i == q["leave"]:
            stream.close()
            gc.collect()  # completions keep their connection until then
            return
        yield event


for line in sys.stdin:
    q, said = json.loads(line), {}
    try:
        {"completions": completions, "chat": chat}[q["api"]](q, said)
    except Exception as e:  # which one is what the tests ask
        said["error"] = {"class": type(e).__name__, "status": getattr(e, "status_code", 0), "message": str(e)}
    print(json.dumps(said), flush=True)
