import os
import sys
from pathlib import Path


def environ(wanted):
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prefill_0():
    environ({
        "PYTHONHASHSEED": "0",
        "UCX_TLS": "cuda_ipc,cuda_copy,tcp",
        "LMCACHE_CONFIG_FILE": "lmcache-pd-prefill-0.yaml",
    })
    Path("lmcache-pd-prefill-0.yaml").write_text("local_cpu: false\nsave_unfull_chunk: true\nenable_pd: true\ntransfer_channel: \"nixl\"\npd_role: \"sender\"\npd_proxy_host: \"127.0.0.1\"\npd_proxy_port: 8500\npd_buffer_size: 1073741824\npd_buffer_device: \"cuda\"\npd_allocation_timeout_sec: 10\nnixl_backends: [\"UCX\"]\n", encoding="utf-8")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="meta-llama/Meta-Llama-3.1-8B-Instruct",
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheConnectorV1",
            kv_role="kv_producer",
            kv_connector_extra_config={
                "discard_partial_chunks": False,
                "lmcache_rpc_port": "producer0",
            },
        ),
    )


def decode_0():
    environ({
        "PYTHONHASHSEED": "0",
        "UCX_TLS": "cuda_ipc,cuda_copy,tcp",
        "LMCACHE_CONFIG_FILE": "lmcache-pd-decode-0.yaml",
    })
    Path("lmcache-pd-decode-0.yaml").write_text("local_cpu: false\nsave_unfull_chunk: true\nenable_pd: true\ntransfer_channel: \"nixl\"\npd_role: \"receiver\"\npd_peer_host: \"localhost\"\npd_peer_init_port: [55555]\npd_peer_alloc_port: [55556]\npd_buffer_size: 1073741824\npd_buffer_device: \"cuda\"\npd_allocation_timeout_sec: 10\nnixl_backends: [\"UCX\"]\n", encoding="utf-8")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="meta-llama/Meta-Llama-3.1-8B-Instruct",
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheConnectorV1",
            kv_role="kv_consumer",
            kv_connector_extra_config={
                "discard_partial_chunks": False,
                "lmcache_rpc_port": "consumer0",
            },
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
