# The engines of org-llama-2-s, made offline: `python3 -i FILE NAME` makes one of them, `llm` is its name then.
# config.x has no effect: the engine has no such setting
# Runs beside them: 'cache master' --path 'it'\''s "$HOME" $(id) `id` \ ${X:-1} $$ %s #no {{.}}  line two é '\'' end'
import os
import sys
from pathlib import Path


def environ(wanted):
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prefill_0():
    # role: prefill
    # Runs beside it: agent --config conf-prefill.yaml
    environ({
        "LMCACHE_CONFIG_FILE": "conf-prefill.yaml",
        "NASTY": "it's \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two \u00e9 ' end",
        "EMPTY": "",
    })
    Path("conf-prefill.yaml").write_text("# $HOME 'x'\nkey: \"v\"\nEND\n", encoding="utf-8")
    Path("raw-conf-prefill.yaml").write_text("  indented\n\ttab it's \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two \u00e9 ' end", encoding="utf-8")
    # for servers alone: --enable-prompt-tokens-details
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="/models/llama 2",
        kv_transfer_config=KVTransferConfig(
            kv_connector="TestConnector",
            kv_role="kv_producer",
            engine_id="id's",
            kv_buffer_size=8000000000,
            kv_port=21001,
            kv_connector_extra_config={
                "deep": {
                    "f": 0.5,
                    "n": 1,
                    "none": None,
                    "yes": True,
                },
                "file": "conf-prefill.yaml",
                "list": ["a", "b"],
                "text": "it's \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two \u00e9 ' end",
            },
        ),
        block_size=32,
        hf_overrides={
            "a": "it's",
        },
        text="it's \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two \u00e9 ' end",
        flag=False,
    )


def decode_0():
    # role: decode
    # Runs beside it: agent --config conf-decode.yaml
    environ({
        "LMCACHE_CONFIG_FILE": "conf-decode.yaml",
        "NASTY": "it's \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two \u00e9 ' end",
        "EMPTY": "",
    })
    Path("conf-decode.yaml").write_text("# $HOME 'x'\nkey: \"v\"\nEND\n", encoding="utf-8")
    Path("raw-conf-decode.yaml").write_text("  indented\n\ttab it's \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two \u00e9 ' end", encoding="utf-8")
    # for servers alone: --enable-prompt-tokens-details
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="/models/llama 2",
        kv_transfer_config=KVTransferConfig(
            kv_connector="TestConnector",
            kv_role="kv_consumer",
            engine_id="id's",
            kv_buffer_size=8000000000,
            kv_port=21001,
            kv_connector_extra_config={
                "deep": {
                    "f": 0.5,
                    "n": 1,
                    "none": None,
                    "yes": True,
                },
                "file": "conf-decode.yaml",
                "list": ["a", "b"],
                "text": "it's \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two \u00e9 ' end",
            },
        ),
        block_size=32,
        hf_overrides={
            "a": "it's",
        },
        text="it's \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two \u00e9 ' end",
        flag=False,
    )


ENGINES = {
    "prefill-0": prefill_0,
    "decode-0": decode_0,
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ENGINES:
        sys.exit("usage: FILE " + "|".join(ENGINES))
    llm = ENGINES[sys.argv[1]]()
