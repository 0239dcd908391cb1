import os
import sys
from pathlib import Path


def environ(wanted):
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prefill_0():
    environ({
        "VLLM_HOST_IP": "10.0.1.2",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    })
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="meta-llama/Meta-Llama-3.1-8B-Instruct",
        kv_transfer_config=KVTransferConfig(
            kv_connector="P2pNcclConnector",
            kv_role="kv_producer",
            kv_buffer_size=8000000000,
            kv_port=21001,
            kv_connector_extra_config={
                "http_port": "20001",
                "proxy_ip": "10.0.1.1",
                "proxy_port": "30001",
            },
        ),
        enable_prefix_caching=False,
    )


def decode_0():
    environ({
        "VLLM_HOST_IP": "10.0.1.3",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    })
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="meta-llama/Meta-Llama-3.1-8B-Instruct",
        kv_transfer_config=KVTransferConfig(
            kv_connector="P2pNcclConnector",
            kv_role="kv_consumer",
            kv_buffer_size=8000000000,
            kv_port=21001,
            kv_connector_extra_config={
                "http_port": "20001",
                "proxy_ip": "10.0.1.1",
                "proxy_port": "30001",
            },
        ),
        enable_prefix_caching=False,
    )


ENGINES = {
    "prefill-0": prefill_0,
    "decode-0": decode_0,
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ENGINES:
        sys.exit("usage: FILE " + "|".join(ENGINES))
    llm = ENGINES[sys.argv[1]]()
