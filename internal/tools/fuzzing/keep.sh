#!/usr/bin/env bash
# Keeps what the fuzzer has found worth keeping: for each fuzz target, up to 8 inputs of the go command's cache go to
# testdata/fuzz beside it, where every `go test` runs them. Run it after a long run:
#
#   FUZZTIME=10m ./test.sh fuzz && internal/tools/fuzzing/keep.sh
#
# Inputs above 600 bytes stay in the cache, as do those of the connectors' common target FuzzConnector: its seeds, the
# suite's own requests and responses, are read from the code.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
each=8

while IFS=: read -r file target; do
  [ "$target" != FuzzConnector ] || continue
  dir=$(dirname "$file")
  cache=$(go env GOCACHE)/fuzz/$(cd "$dir" && go list .)/$target
  [ -d "$cache" ] || continue
  kept=$dir/testdata/fuzz/$target
  mkdir -p "$kept"
  have=$(find "$kept" -type f | wc -l)
  # Inputs of all sizes: each n-th of those in the order of their sizes.
  find "$cache" -type f -size -600c -printf '%s %p\n' | sort -n | awk -v want=$((each - have)) '
    { path[NR] = $2 }
    END { for (i = 0; i < want && i < NR; i++) print path[NR <= want ? i + 1 : int(i * NR / want) + 1] }' |
    xargs -r cp -t "$kept"
  rmdir --ignore-fail-on-non-empty -p "$kept"
done < <(find . -path './.?*' -prune -o -name '*_test.go' -print0 | xargs -0 grep -HoE '^func Fuzz[A-Za-z0-9_]*' |
  sed 's/func //')
