#!/bin/sh
# The engines of sharedstorage. Each line starts one of them, with further arguments if there are any:
#   sh FILE prefill-0
#   sh FILE decode-0
# The file lists no engines, so here is one of each role. Others: --prefill and --decode.
# config.sharedStoragePath: kv_connector_extra_config.shared_storage_path; every engine of the model must see the same files there
set -eu
name=${1:-}
[ $# -eq 0 ] || shift
case $name in
prefill-0)
  exec vllm serve meta-llama/Llama-3.2-1B-Instruct \
    --host 127.0.0.1 \
    --port 8100 \
    --kv-transfer-config '{"kv_connector":"SharedStorageConnector","kv_role":"kv_both","kv_connector_extra_config":{"shared_storage_path":"local_storage"}}' \
    --enable-prompt-tokens-details "$@"
  ;;
decode-0)
  exec vllm serve meta-llama/Llama-3.2-1B-Instruct \
    --host 127.0.0.1 \
    --port 8200 \
    --kv-transfer-config '{"kv_connector":"SharedStorageConnector","kv_role":"kv_both","kv_connector_extra_config":{"shared_storage_path":"local_storage"}}' \
    --enable-prompt-tokens-details "$@"
  ;;
*)
  echo 'usage: sh FILE prefill-0|decode-0' >&2
  exit 2
  ;;
esac
