# The engines of llama2-405b, made offline: `python3 -i FILE NAME` makes one of them, `llm` is its name then.
# The file lists no engines, so here is one of each role. Others: --prefill and --decode.
# sideChannelHost: the side channel's host goes into every handoff: a loopback address works only if all engines are on one machine
# resources.maxMemory has no effect: NIXL keeps no KV of its own: it lies in the engine's KV cache, which --kv-cache-memory-bytes or --gpu-memory-utilization bounds
# config.clusterEndpoints has no effect: there is no cluster to join: engines find each other by the handoff, and the gateway finds them by discovery
# config.nodeId has no effect: an engine's id must be its own and new at each start, or decode engines use a restarted engine's old addresses; vLLM makes it
# config.bufferSize has no effect: blocks are moved straight from one KV cache to another; NixlConnector does not read vLLM's kv_buffer_size
# config.connectionPoolSize has no effect: NIXL has one connection between each two workers
# config.maxConcurrency has no effect: the engine's scheduler bounds what runs at once: --max-num-seqs
# config.maxMemoryPerNode has no effect: KV lies in the engine's own cache, which --kv-cache-memory-bytes or --gpu-memory-utilization bounds
# config.replicationFactor has no effect: NIXL copies blocks from one engine's memory to another's; it keeps no copies and spreads none
# config.consistencyLevel has no effect: NIXL copies blocks from one engine's memory to another's; it keeps no copies and spreads none
# config.shardingStrategy has no effect: NIXL copies blocks from one engine's memory to another's; it keeps no copies and spreads none
# config.hashFunction has no effect: blocks are named by the handoff, not found by a hash
# config.failoverTimeout has no effect: failing over is the gateway's: retry and fallback
# config.retryPolicy has no effect: retrying is the gateway's: retry
import os
import sys
from pathlib import Path


def environ(wanted):
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prefill_0():
    environ({
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "7777",
        "PYTHONHASHSEED": "0",
        "UCX_TLS": "tcp,cuda_copy,cuda_ipc",
        "UCX_NET_DEVICES": "eth0",
        "UCX_KEEPALIVE_INTERVAL": "30s",
    })
    # for servers alone: --enable-prompt-tokens-details
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="llama2-405b",
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_producer",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                "kv_lease_duration": 30,
            },
        ),
    )


def decode_0():
    environ({
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "7778",
        "PYTHONHASHSEED": "0",
        "UCX_TLS": "tcp,cuda_copy,cuda_ipc",
        "UCX_NET_DEVICES": "eth0",
        "UCX_KEEPALIVE_INTERVAL": "30s",
    })
    # for servers alone: --enable-prompt-tokens-details
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model="llama2-405b",
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_consumer",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                "kv_lease_duration": 30,
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
