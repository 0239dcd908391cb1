# The engines of pynccl, made offline: `python3 -i FILE NAME` makes one of them, `llm` is its name then.
# The file lists no engines, so here is one of each role. Others: --prefill and --decode.
# config.kv_ip: is not set: the engines use 127.0.0.1, and must then run on one machine
# args.--enable-chunked-prefill: must be off: only a prompt that is computed in one step is put into the buffer
# args.--tensor-parallel-size: must be equal on both engines: they hang otherwise (vllm#14952)
import os
import sys
from pathlib import Path


def environ(wanted):
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prefill_0():
    environ({
        "VLLM_USE_V1": "0",
    })
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="meta-llama/Meta-Llama-3.1-8B-Instruct",
        kv_transfer_config=KVTransferConfig(
            kv_connector="PyNcclConnector",
            kv_role="kv_producer",
            kv_rank=0,
            kv_parallel_size=2,
        ),
    )


def decode_0():
    environ({
        "VLLM_USE_V1": "0",
    })
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="meta-llama/Meta-Llama-3.1-8B-Instruct",
        kv_transfer_config=KVTransferConfig(
            kv_connector="PyNcclConnector",
            kv_role="kv_consumer",
            kv_rank=1,
            kv_parallel_size=2,
        ),
    )


ENGINES = {
    "prefill-0": prefill_0,
    "decode-0": decode_0,
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ENGINES:
        sys.exit("usage: FILE " + "|".join(ENGINES))
    llm = ENGINES[sys.argv[1]]()
