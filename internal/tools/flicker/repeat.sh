#!/usr/bin/env bash
# Runs each test and example by itself, again and again, under the race detector and several beside each other. One that
# fails once in a hundred times shows here within minutes; in whole runs of ./test.sh it does in days.
#
#   [TIME=5] [PROCESSES=4] internal/tools/flicker/repeat.sh [PACKAGE...]
#
# TIME is seconds for each test: it is run once, and then as often as fits, at most 1,000 times. Without a PACKAGE the
# tests of all modules are run, for an hour or two; their programs take 4 GB of the temporary folder meanwhile. It ends
# with 0 only if no test failed, and shows what the others wrote.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
TMP=$(mktemp -d)
trap 'rm -rf "$TMP"' EXIT
export TMP TIME=${TIME:-5}

# again runs one test: FOLDER PROGRAM NAME.
again() {
  local log=$TMP/$3.$$ took times
  cd "$1"
  local run=("$2" -test.run "^$3\$" -test.v -test.shuffle on -test.timeout 10m)
  if "${run[@]}" > "$log" 2>&1; then
    ! grep -q "^--- SKIP: $3 " "$log" || { grep -A 1 "^=== RUN" "$log"; return 0; }
    took=$(sed -nE "s/^--- [A-Z]+: $3 \(([0-9.]+)s\)/\1/p" "$log")
    times=$(awk -v time="$TIME" -v took="${took:-$TIME}" 'BEGIN {
      n = time / (took + 0.005); print int(n > 1000 ? 1000 : n) }')
    if [ "$times" -le 1 ] || "${run[@]}" -test.count "$times" -test.failfast > "$log" 2>&1; then
      echo $((times > 1 ? times + 1 : 1)) >> "$TMP/runs"
      rm "$log"
      return
    fi
  fi
  echo "==> $1: $3"
  # What passed before is left out.
  awk '/^--- PASS|^=== RUN +[^\/]*$/ { if (!bad) text = "" } { text = text $0 "\n" } /^--- FAIL|^panic/ { bad = 1 }
    END { printf "%s", text }' "$log"
  return 1
}
export -f again

if [ $# = 0 ]; then
  modules=$(go list -m -f '{{.Dir}}/...')
  # shellcheck disable=SC2086 # one word for each module
  set -- $modules
fi
folders=$(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.Dir}}{{end}}' "$@")
number=0
for folder in $folders; do
  program=$TMP/$((number += 1)).test
  (cd "$folder" && go test -race -c -o "$program" .)
  (cd "$folder" && "$program" -test.list '^(Test|Example)') |
    awk -v what="$folder $program" '/^(Test|Example)/ { print what, $1 }'
done | sort -R > "$TMP/tests"
[ -s "$TMP/tests" ] || { echo "no tests in: $*" >&2; exit 2; }
status=0
: > "$TMP/runs"
xargs -P "${PROCESSES:-4}" -n 3 bash -c 'again "$@"' again < "$TMP/tests" || status=1
awk -v tests="$(wc -l < "$TMP/tests")" '{ runs += $1 }
  END { print tests " tests, of which " NR " ran and never failed, in " runs + 0 " runs" }' "$TMP/runs"
exit $status
