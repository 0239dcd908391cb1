#!/bin/sh
set -eu
name=${1:-}
[ $# -eq 0 ] || shift
case $name in
prefill-0)
  cat > lmcache-prefill-0.yaml <<'END'
chunk_size: 256
local_cpu: true
max_local_cpu_size: 8
remote_url: "redis://redis.default.svc.cluster.local:6379"
remote_serde: "naive"
cache_policy: "LRU"
END
  exec env \
    PYTHONHASHSEED=0 \
    LMCACHE_CONFIG_FILE=lmcache-prefill-0.yaml \
    vllm serve llama2-70b \
    --host 127.0.0.1 \
    --port 8100 \
    --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both","kv_connector_extra_config":{"lmcache_rpc_port":"lmcache-prefill-0"}}' \
    --enable-prompt-tokens-details "$@"
  ;;
decode-0)
  cat > lmcache-decode-0.yaml <<'END'
chunk_size: 256
local_cpu: true
max_local_cpu_size: 8
remote_url: "redis://redis.default.svc.cluster.local:6379"
remote_serde: "naive"
cache_policy: "LRU"
END
  exec env \
    PYTHONHASHSEED=0 \
    LMCACHE_CONFIG_FILE=lmcache-decode-0.yaml \
    vllm serve llama2-70b \
    --host 127.0.0.1 \
    --port 8200 \
    --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both","kv_connector_extra_config":{"lmcache_rpc_port":"lmcache-decode-0"}}' \
    --enable-prompt-tokens-details "$@"
  ;;
*)
  echo 'usage: sh FILE prefill-0|decode-0' >&2
  exit 2
  ;;
esac
