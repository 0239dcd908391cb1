#!/bin/sh
set -eu
name=${1:-}
[ $# -eq 0 ] || shift
case $name in
prefill-0)
  cat > lmcache-pd-prefill-0.yaml <<'END'
local_cpu: false
save_unfull_chunk: true
enable_pd: true
transfer_channel: "nixl"
pd_role: "sender"
pd_proxy_host: "127.0.0.1"
pd_proxy_port: 8500
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
pd_allocation_timeout_sec: 10
nixl_backends: ["UCX"]
END
  exec env \
    PYTHONHASHSEED=0 \
    UCX_TLS=cuda_ipc,cuda_copy,tcp \
    LMCACHE_CONFIG_FILE=lmcache-pd-prefill-0.yaml \
    vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct \
    --host 127.0.0.1 \
    --port 8100 \
    --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_producer","kv_connector_extra_config":{"discard_partial_chunks":false,"lmcache_rpc_port":"producer0"}}' \
    --enable-prompt-tokens-details "$@"
  ;;
decode-0)
  cat > lmcache-pd-decode-0.yaml <<'END'
local_cpu: false
save_unfull_chunk: true
enable_pd: true
transfer_channel: "nixl"
pd_role: "receiver"
pd_peer_host: "localhost"
pd_peer_init_port: [55555]
pd_peer_alloc_port: [55556]
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
pd_allocation_timeout_sec: 10
nixl_backends: ["UCX"]
END
  exec env \
    PYTHONHASHSEED=0 \
    UCX_TLS=cuda_ipc,cuda_copy,tcp \
    LMCACHE_CONFIG_FILE=lmcache-pd-decode-0.yaml \
    vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct \
    --host 127.0.0.1 \
    --port 8200 \
    --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer","kv_connector_extra_config":{"discard_partial_chunks":false,"lmcache_rpc_port":"consumer0"}}' \
    --enable-prompt-tokens-details "$@"
  ;;
*)
  echo 'usage: sh FILE prefill-0|decode-0' >&2
  exit 2
  ;;
esac
