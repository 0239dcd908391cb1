#!/bin/sh
set -eu
name=${1:-}
[ $# -eq 0 ] || shift
case $name in
prefill-0)
  exec vllm serve llama2-7b \
    --host 127.0.0.1 \
    --port 8100 \
    --enable-prompt-tokens-details "$@"
  ;;
decode-0)
  exec vllm serve llama2-7b \
    --host 127.0.0.1 \
    --port 8200 \
    --enable-prompt-tokens-details "$@"
  ;;
*)
  echo 'usage: sh FILE prefill-0|decode-0' >&2
  exit 2
  ;;
esac
