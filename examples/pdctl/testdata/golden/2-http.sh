#!/bin/sh
# The engines of llama2-7b. Each line starts one of them, with further arguments if there are any:
#   sh FILE prefill-0
#   sh FILE decode-0
# The file lists no engines, so here is one of each role. Others: --prefill and --decode.
# nothing moves KV between these engines: every prompt is computed twice, unless they share a store by settings of their own
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
