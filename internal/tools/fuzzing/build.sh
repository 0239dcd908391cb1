#!/usr/bin/env bash
# Builds every fuzz target as OSS-Fuzz's builders want it. It runs inside their image base-builder-go, which has
# compile_native_go_fuzzer and the folder $OUT:
#
#   FROM gcr.io/oss-fuzz-base/base-builder-go
#   RUN git clone --depth 1 https://github.com/pdkit/pdkit pdkit
#   WORKDIR pdkit
#   COPY build.sh $SRC/          # exec bash internal/tools/fuzzing/build.sh
#
# A target is named after its package and function, so that one that comes or goes needs no edit here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
: "${OUT:?where the fuzzers go}"

while IFS=: read -r file target; do
  dir=$(dirname "$file")
  name=$(tr -c 'A-Za-z0-9\n' _ <<< "${dir#./}")_$target
  echo "building $name"
  (cd "$dir" && compile_native_go_fuzzer "$(go list .)" "$target" "$name")
done < <(find . -path './.?*' -prune -o -name '*_test.go' -print0 | xargs -0 grep -HoE '^func Fuzz[A-Za-z0-9_]*' |
  sed 's/func //')
