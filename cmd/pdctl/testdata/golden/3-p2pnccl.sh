#!/bin/sh
set -eu
name=${1:-}
[ $# -eq 0 ] || shift
case $name in
prefill-0)
  exec env \
    VLLM_HOST_IP=10.0.1.2 \
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 \
    vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct \
    --host 10.0.1.2 \
    --port 20001 \
    --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_buffer_size":8000000000,"kv_port":21001,"kv_connector_extra_config":{"http_port":"20001","proxy_ip":"10.0.1.1","proxy_port":"30001"}}' \
    --no-enable-prefix-caching "$@"
  ;;
decode-0)
  exec env \
    VLLM_HOST_IP=10.0.1.3 \
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 \
    vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct \
    --host 10.0.1.3 \
    --port 20001 \
    --kv-transfer-config '{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer","kv_buffer_size":8000000000,"kv_port":21001,"kv_connector_extra_config":{"http_port":"20001","proxy_ip":"10.0.1.1","proxy_port":"30001"}}' \
    --no-enable-prefix-caching "$@"
  ;;
*)
  echo 'usage: sh FILE prefill-0|decode-0' >&2
  exit 2
  ;;
esac
