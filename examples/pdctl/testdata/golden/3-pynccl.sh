#!/bin/sh
# The engines of pynccl. Each line starts one of them, with further arguments if there are any:
#   sh FILE prefill-0
#   sh FILE decode-0
# The file lists no engines, so here is one of each role. Others: --prefill and --decode.
# config.kv_ip: is not set: the engines use 127.0.0.1, and must then run on one machine
# args.--enable-chunked-prefill: must be off: only a prompt that is computed in one step is put into the buffer
# args.--tensor-parallel-size: must be equal on both engines: they hang otherwise (vllm#14952)
set -eu
name=${1:-}
[ $# -eq 0 ] || shift
case $name in
prefill-0)
  exec env \
    VLLM_USE_V1=0 \
    vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct \
    --host 127.0.0.1 \
    --port 8100 \
    --kv-transfer-config '{"kv_connector":"PyNcclConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2}' "$@"
  ;;
decode-0)
  exec env \
    VLLM_USE_V1=0 \
    vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct \
    --host 127.0.0.1 \
    --port 8200 \
    --kv-transfer-config '{"kv_connector":"PyNcclConnector","kv_role":"kv_consumer","kv_rank":1,"kv_parallel_size":2}' "$@"
  ;;
*)
  echo 'usage: sh FILE prefill-0|decode-0' >&2
  exit 2
  ;;
esac
