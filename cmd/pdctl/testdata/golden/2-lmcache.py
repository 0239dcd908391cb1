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
        "LMCACHE_CONFIG_FILE": "lmcache-prefill-0.yaml",
    })
    Path("lmcache-prefill-0.yaml").write_text("chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 8\nremote_url: \"redis://redis.default.svc.cluster.local:6379\"\nremote_serde: \"naive\"\ncache_policy: \"LRU\"\n", encoding="utf-8")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="llama2-70b",
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheConnectorV1",
            kv_role="kv_both",
            kv_connector_extra_config={
                "lmcache_rpc_port": "lmcache-prefill-0",
            },
        ),
    )


def decode_0():
    environ({
        "PYTHONHASHSEED": "0",
        "LMCACHE_CONFIG_FILE": "lmcache-decode-0.yaml",
    })
    Path("lmcache-decode-0.yaml").write_text("chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 8\nremote_url: \"redis://redis.default.svc.cluster.local:6379\"\nremote_serde: \"naive\"\ncache_policy: \"LRU\"\n", encoding="utf-8")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="llama2-70b",
        kv_transfer_config=KVTransferConfig(
            kv_connector="LMCacheConnectorV1",
            kv_role="kv_both",
            kv_connector_extra_config={
                "lmcache_rpc_port": "lmcache-decode-0",
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
