#!/bin/sh
# The engines of org-llama-2-s. Each line starts one of them, with further arguments if there are any:
#   sh FILE master
#   sh FILE prefill-0-agent
#   sh FILE prefill-0
#   sh FILE decode-0-agent
#   sh FILE decode-0
# config.x has no effect: the engine has no such setting
set -eu
name=${1:-}
[ $# -eq 0 ] || shift
case $name in
master)
  exec 'cache master' \
    --path 'it'\''s "$HOME" $(id) `id` \ ${X:-1} $$ %s #no {{.}}
	line two é '\'' end' "$@"
  ;;
prefill-0-agent)
  exec agent \
    --config conf-prefill.yaml "$@"
  ;;
prefill-0)
  # role: prefill
  cat > conf-prefill.yaml <<'END_'
# $HOME 'x'
key: "v"
END
END_
  cat > raw-conf-prefill.yaml <<'END'
  indented
	tab it's "$HOME" $(id) `id` \ ${X:-1} $$ %s #no {{.}}
	line two é ' end
END
  exec env \
    LMCACHE_CONFIG_FILE=conf-prefill.yaml \
    NASTY='it'\''s "$HOME" $(id) `id` \ ${X:-1} $$ %s #no {{.}}
	line two é '\'' end' \
    EMPTY='' \
    vllm serve '/models/llama 2' \
    --served-model-name 'Org/Llama 2'\''s' \
    --host 10.0.0.1 \
    --port 8100 \
    --kv-transfer-config '{"kv_connector":"TestConnector","kv_role":"kv_producer","engine_id":"id'\''s","kv_buffer_size":8000000000,"kv_port":21001,"kv_connector_extra_config":{"deep":{"f":0.5,"n":1,"none":null,"yes":true},"file":"conf-prefill.yaml","list":["a","b"],"text":"it'\''s \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two é '\'' end"}}' \
    --block-size 32 \
    --enable-prompt-tokens-details \
    --hf-overrides '{"a": "it'\''s"}' \
    '--text=it'\''s "$HOME" $(id) `id` \ ${X:-1} $$ %s #no {{.}}
	line two é '\'' end' \
    --no-flag "$@"
  ;;
decode-0-agent)
  exec agent \
    --config conf-decode.yaml "$@"
  ;;
decode-0)
  # role: decode
  cat > conf-decode.yaml <<'END_'
# $HOME 'x'
key: "v"
END
END_
  cat > raw-conf-decode.yaml <<'END'
  indented
	tab it's "$HOME" $(id) `id` \ ${X:-1} $$ %s #no {{.}}
	line two é ' end
END
  exec env \
    LMCACHE_CONFIG_FILE=conf-decode.yaml \
    NASTY='it'\''s "$HOME" $(id) `id` \ ${X:-1} $$ %s #no {{.}}
	line two é '\'' end' \
    EMPTY='' \
    vllm serve '/models/llama 2' \
    --served-model-name 'Org/Llama 2'\''s' \
    --host 10.0.0.2 \
    --port 8200 \
    --kv-transfer-config '{"kv_connector":"TestConnector","kv_role":"kv_consumer","engine_id":"id'\''s","kv_buffer_size":8000000000,"kv_port":21001,"kv_connector_extra_config":{"deep":{"f":0.5,"n":1,"none":null,"yes":true},"file":"conf-decode.yaml","list":["a","b"],"text":"it'\''s \"$HOME\" $(id) `id` \\ ${X:-1} $$ %s #no {{.}}\n\tline two é '\'' end"}}' \
    --block-size 32 \
    --enable-prompt-tokens-details \
    --hf-overrides '{"a": "it'\''s"}' \
    '--text=it'\''s "$HOME" $(id) `id` \ ${X:-1} $$ %s #no {{.}}
	line two é '\'' end' \
    --no-flag "$@"
  ;;
*)
  echo 'usage: sh FILE master|prefill-0-agent|prefill-0|decode-0-agent|decode-0' >&2
  exit 2
  ;;
esac
