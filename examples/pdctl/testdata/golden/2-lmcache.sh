#!/bin/sh
# The engines of llama2-70b. Each line starts one of them, with further arguments if there are any:
#   sh FILE prefill-0
#   sh FILE decode-0
# The file lists no engines, so here is one of each role. Others: --prefill and --decode.
# config.maxCacheSize has no effect: Redis bounds itself: its own maxmemory
# resources.maxMemory: LMCache's max_local_cpu_size, in GB
# config.backendType: LMCache's remote_url
# config.redisConfig.host: LMCache's remote_url
# config.redisConfig.port: LMCache's remote_url
# config.redisConfig.username has no effect: is not written into a file. LMCache takes it in remote_url only: set LMCACHE_REMOTE_URL=redis://USER:PASSWORD@HOST:PORT/DATABASE in the engines' environment, from a secret; it wins over the file
# config.redisConfig.password has no effect: is not written into a file. LMCache takes it in remote_url only: set LMCACHE_REMOTE_URL=redis://USER:PASSWORD@HOST:PORT/DATABASE in the engines' environment, from a secret; it wins over the file
# config.serverEndpoints has no effect: LMCache has one remote_url, which redisConfig has taken
# config.evictionPolicy: LMCache's cache_policy
# config.connectionTimeout has no effect: LMCache has no limit for connecting; blocking_timeout_secs bounds how long an engine waits for a chunk
# config.poolSize has no effect: LMCache sizes its connections to the store itself
# config.ttl has no effect: LMCache's chunks do not expire; they are evicted
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
