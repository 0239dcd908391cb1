#!/usr/bin/env bash
# Asks the installed engines' own request models which values they take of the members that a prefill leg loses or
# changes (members.py), and compares that with the files in connector/testdata, to which tests hold pdkit's rules.
#
#   members.sh [-write]     -write: writes the files anew
#
# Installs the engines if need be. Exit status: 0 when the files are as the engines say. No engine is started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
lab/engines/sglang/install.sh # after vLLM's
DIR=$(cd "${PDKIT_ENGINES_DIR:-.engines}" && pwd)
TMP=$(mktemp -d)
trap 'rm -rf "$TMP"' EXIT

for name in "${!VLLM_@}" "${!SGLANG_@}"; do unset "$name"; done # nothing of the caller's may change what is proven
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1
[ ! -d "$DIR/lib" ] || export LD_LIBRARY_PATH=$DIR/lib
differ=0
for engine in vllm sglang; do
  case $engine in vllm) path= ;; sglang) path=$PWD/lab/engines/sglang:$DIR/sglang ;; esac
  PYTHONPATH=$path "$DIR/venv/bin/python" -W ignore lab/engines/members.py $engine > "$TMP/values" 2> "$TMP/log" ||
    { cat "$TMP/log" >&2; exit 1; }
  version=$(sed -n '1s/.*"engine": "\([^"]*\)".*/\1/p' "$TMP/values")
  file=connector/testdata/${version/ /-}-member-values.json
  if [ "${1:-}" = -write ]; then
    cp "$TMP/values" "$file"
  elif ! diff "$file" "$TMP/values"; then
    echo "$file is not what $version says; run $0 -write, then go test ./connector/all" >&2
    differ=1
    continue
  fi
  echo "$file is as $version says"
done
exit $differ
