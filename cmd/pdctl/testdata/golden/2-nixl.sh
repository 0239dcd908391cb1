#!/bin/sh
set -eu
name=${1:-}
[ $# -eq 0 ] || shift
case $name in
prefill-0)
  exec env \
    VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
    VLLM_NIXL_SIDE_CHANNEL_PORT=7777 \
    PYTHONHASHSEED=0 \
    UCX_TLS=tcp,cuda_copy,cuda_ipc \
    UCX_NET_DEVICES=eth0 \
    UCX_KEEPALIVE_INTERVAL=30s \
    vllm serve llama2-405b \
    --host 127.0.0.1 \
    --port 8100 \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_load_failure_policy":"fail","kv_connector_extra_config":{"kv_lease_duration":30}}' \
    --enable-prompt-tokens-details "$@"
  ;;
decode-0)
  exec env \
    VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \
    VLLM_NIXL_SIDE_CHANNEL_PORT=7778 \
    PYTHONHASHSEED=0 \
    UCX_TLS=tcp,cuda_copy,cuda_ipc \
    UCX_NET_DEVICES=eth0 \
    UCX_KEEPALIVE_INTERVAL=30s \
    vllm serve llama2-405b \
    --host 127.0.0.1 \
    --port 8200 \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_load_failure_policy":"fail","kv_connector_extra_config":{"kv_lease_duration":30}}' \
    --enable-prompt-tokens-details "$@"
  ;;
*)
  echo 'usage: sh FILE prefill-0|decode-0' >&2
  exit 2
  ;;
esac
