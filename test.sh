#!/usr/bin/env bash
# The one test command. It ends with a table, and with 0 only if no step failed.
#
#   ./test.sh [-real | -real-all] [-nightly] [STEP...]
#
#   format      gofmt, and the syntax of the scripts
#   modules     each module's go.mod is tidy
#   tools       builds the lint tools at their pinned versions (internal/tools/versions) into .tools, once
#   lint        golangci-lint, see .golangci.yml: vet and staticcheck are among its linters
#   vulnerable  govulncheck: no vulnerability that is known today is reachable from any module
#   servers     gets the servers and clients that tests talk to (CoreDNS, Kubernetes, Envoy, Prometheus, Chromium, podman,
#               tmux and shells, and the client libraries of lab/clients), once: some minutes (only with -real)
#   test        all tests of all modules, in random order: those of libraries in which goroutines meet with the race
#               detector, the others without; what the fuzzers have found is among them, and so are the interleavings
#               of lab/states
#   quickstart  examples/quickstart proves that KV is reused, and sees when it is not
#   install     real engines into .engines, once: some minutes and 3 GB (only with -real)
#   real        compares the values that their request models accept with the committed ones;
#               lab/engines proves reuse with them (only with -real): nixl and lmcache, and of the other
#               connectors those to which the day of the year turns; with -real-all, all of them, the encode stage and
#               attestation
#
# With -nightly also these. With CI=true one of them is run, to which the day of the year turns (of race one half, and the
# other half at its next turn), and a twentieth of fuzz; and release, if a commit of the last day changed a go.mod or the
# scripts of releases:
#
#   alone       each module builds by itself, without go.work
#   race        with the race detector what the step test ran without
#   nethttp     transport and pdflow over net/http's client, and the script that repeats tests
#   reliability lab/reliability, short: 60 s of chaos, a soak of some seconds, 500 slow streams at a time
#   bench       what each request runs through, against the commit before (internal/tools/hotpaths); lab/bench, short: all
#               responses checked, no figure beyond 2.5 times its target
#   faults      lab/engines plays faults with real engines, and rescues streams (only with -real)
#   fuzz        each fuzz target for FUZZTIME (5s; for a long run 10m, which is 5 hours in all, two at a time)
#   release     a release in a clone of HEAD, whose modules and programs are then got as users get them, and whose
#               container images and checksums are made: some minutes the first time
#
# Without a STEP all are run. What this machine cannot run is skipped and said. With CI=true nothing is but vulnerable,
# where its database cannot be reached: real engines are included, and a step that cannot run has failed.
# ./test.sh -real-all real proves all connectors and does nothing else.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2

STEPS="format modules tools lint vulnerable servers test quickstart install real"
TURNS="alone race nethttp reliability bench faults" # of which CI runs one each day
NIGHTLY="$TURNS fuzz release"
FUZZTIME=${FUZZTIME:-5s}
CI=${CI:-}
SKIPPED=77 # a step's exit status for "not here"

# ---- helpers of the steps; each step runs in a shell of its own with set -e

say() { printf '\n==> %s\n' "$*"; }

# skip ends a step that this machine cannot run.
skip() {
  echo "$*" > "$TMP/$STEP.why"
  if [ "$CI" = true ]; then
    echo "$STEP: $* (with CI=true that is a failure)" >&2
    exit 1
  fi
  echo "$STEP: skipped: $*"
  exit $SKIPPED
}

# each runs a command in the folder of each module of go.work. All are run; one that fails fails the step.
each() {
  local dir failed=0
  for dir in $(go list -m -f '{{.Dir}}'); do
    (cd "$dir" && "$@") || { echo "failed in module folder ${dir#"$PWD"/}: $*" >&2; failed=1; }
  done
  return $failed
}

# ---- steps

step_format() {
  local files
  files=$(find . -path './.?*' -prune -o -name '*.go' -print0 | xargs -0 gofmt -l -s)
  if [ -n "$files" ]; then
    echo "not as gofmt -s writes it:" >&2
    echo "$files" >&2
    return 1
  fi
  find . -path './.?*' -prune -o -name '*.sh' -print0 | xargs -0 -n 1 bash -n
  bash -n .ci/run
}

step_modules() {
  export GOWORK=off
  local dir
  for dir in $(GOWORK='' go list -m -f '{{.Dir}}'); do
    (cd "$dir" && go mod tidy -diff)
  done
}

step_alone() {
  export GOWORK=off
  local dir
  for dir in $(GOWORK='' go list -m -f '{{.Dir}}'); do
    (cd "$dir" && go build ./...)
  done
}

step_tools() {
  local path version name have
  go version
  while read -r path version; do
    name=${path##*/}
    # Rebuilt for another version of the tool or of Go: a linter reads code only of Go versions that it was built with.
    have=$({ go version -m ".tools/$name" 2>/dev/null || true; } | awk -v v="$version" -v g="$(go env GOVERSION)" '
      NR == 1 { go = $2 } $1 == "mod" { mod = $3 } END { print (go == g && mod == v) ? "yes" : "no" }')
    if [ "$have" != yes ]; then
      echo "building $name $version"
      GOBIN=$PWD/.tools go install "$path@$version"
    fi
  done < <(grep -v '^#' internal/tools/versions)
}

step_lint() {
  step_tools
  each "$PWD/.tools/golangci-lint" run ./...
}

# Where its database cannot be reached the step is skipped, with CI=true, too: that is no fault of a change.
step_vulnerable() {
  step_tools
  if ! .tools/govulncheck ./internal/cut > "$TMP/vulnerable" 2>&1 &&
    grep 'fetching vulnerabilities' "$TMP/vulnerable"; then
    CI='' skip "the database (vuln.go.dev, or where GOVULNDB says) cannot be reached"
  fi
  each "$PWD/.tools/govulncheck" ./...
}

step_release() {
  git rev-parse --quiet --verify HEAD > /dev/null 2>&1 || skip "releases are made from a git repository"
  go run ./internal/tools/release
}

# step_servers brings what tests need and are skipped without, except with CI=true. It takes three ways beside each
# other: what Go builds, what Debian has, since apt-get runs once at a time, and what Python has.
step_servers() {
  local way ways=() failed=0
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    # Once: else each script would do it, and find the lists locked. Offline, what is installed already is enough.
    apt-get -qq update || true
  fi
  for way in "discovery/kubernetes/testdata discovery/dns/testdata" "cmd/gateway/live cmd/images cmd/gateway/prometheus" \
    "lab/clients connector/lmcachepd/testdata extproc/testdata"; do # lab/clients first: it gets curl
    install_all $way > "$TMP/${way//\//_}.log" 2>&1 &
    ways+=($!)
  done
  for way in "${ways[@]}"; do wait "$way" || failed=1; done
  cat "$TMP"/*_*.log
  return $failed
}

# install_all runs the install.sh of each folder.
install_all() {
  local dir
  for dir; do "$dir/install.sh" || { echo "$dir/install.sh failed" >&2; return 1; }; done
}

# packages prints the packages of all modules in which goroutines meet, or the others: those of programs, of examples,
# of the laboratory and of internal packages that only compute.
packages() {
  local others='^github.com/pdkit/pdkit/(cmd|examples|lab|internal/(contract|jsonedit|request|resume|sse|tools|verdict))(/|$)' not=
  [ "$1" = others ] || not=-v
  # shellcheck disable=SC2046,SC2086 # one word for each module; no word if it is empty
  go list $(go list -m -f '{{.Dir}}' | sed 's#$#/...#') | grep $not -E "$others"
}

# The race detector needs a C compiler. Without one the tests run all the same. The two groups run beside each other,
# since the tests of both wait most of the time.
step_test() {
  local race=-race failed=0 ATONCE=2
  if ! command -v "$(go env CC)" > /dev/null; then
    [ "$CI" != true ] || skip "the race detector needs a C compiler ($(go env CC))"
    race=
    echo "without the race detector, which needs a C compiler ($(go env CC))" > "$TMP/$STEP.why"
  fi
  # shellcheck disable=SC2046 # one word for each package
  tests $(packages others) > "$TMP/others.out" 2>&1 &
  # shellcheck disable=SC2046
  tests $race $(packages meeting) || failed=1
  wait $! || failed=1
  cat "$TMP/others.out"
  return $failed
}

step_race() {
  # shellcheck disable=SC2046
  tests -race $(packages others | part 2 "${DAY_OF_TURN:-}")
}

# part prints of its input every Nth line, and all lines if the second argument is empty: the lines of one day of N.
part() { awk -v n="$1" -v day="$2" 'day == "" || NR % n == day % n'; }

step_nethttp() {
  PDKIT_TEST_HTTP_CLIENT=nethttp tests -race ./transport ./pdflow
  TIME=1 internal/tools/flicker/repeat.sh ./internal/cut # so that it can be relied on
}

# tests runs go test, and packages that failed once more, one after the other: on a machine that others use, too, a test can
# wait longer for the processor than for any fault. What passes only then is named in the table. A data race, a leak, a
# panic, a timeout and what does not build are never forgiven, nor more than three packages. lint has vetted the code.
# Tests that may run beside others wait most of the time, so there are more of them than processors.
tests() {
  local log packages
  log=$(mktemp "$TMP/tests.XXXXXX")
  go test -vet=off -shuffle=on -timeout 15m -p "${ATONCE:-3}" -parallel 8 "$@" 2>&1 | tee "$log" && return 0
  packages=$(awk -F '\t' '$1 == "FAIL" && $2 ~ /^[a-z]/ && $3 ~ /s$/ { print $2 }' "$log")
  if [ -z "$packages" ] || [ "$(wc -l <<< "$packages")" -gt 3 ] ||
    grep -qE '^WARNING: DATA RACE|^(panic|fatal error): |goleak: |unexpected goroutines|\[(build|setup) failed\]' "$log"; then
    return 1
  fi
  say "once more:" $packages
  local flags=()
  for arg; do case $arg in -*) flags+=("$arg") ;; esac; done
  # shellcheck disable=SC2086 # one word for each package
  go test -vet=off -shuffle=on -timeout 15m -p 1 "${flags[@]}" $packages || return 1
  echo "$(wc -l <<< "$packages") passed at the second try:" \
    $(grep -oE '^--- FAIL: [^ ]+' "$log" | cut -d ' ' -f 3) >> "$TMP/$STEP.why"
}

# step_fuzz runs two targets beside each other, with one worker each: half of a short run is compiling and linking.
step_fuzz() {
  local targets
  targets=$(find . -path './.?*' -prune -o -name '*_test.go' -print0 |
    xargs -0 grep -HoE '^func Fuzz[A-Za-z0-9_]*' | sed 's/func //' | sort) # twenty parts are all of them only in one order
  [ -n "$targets" ]
  targets=$(part 20 "${DAY:-}" <<< "$targets")
  export FUZZTIME TMP
  export -f fuzz_one
  xargs -P 2 -n 1 bash -c 'fuzz_one "$1"' fuzz <<< "$targets"
}

# fuzz_one runs one target, FILE:NAME. It forgives, three times, that the fuzzer reports its own end of time as a
# failure without an input (golang.org/issue/75804).
fuzz_one() {
  local file=${1%%:*} target=${1#*:} log try
  log=$(mktemp "$TMP/fuzz.XXXXXX")
  for try in 1 2 3 4; do # seen in one of 25 runs
    if (cd "${file%/*}" && go test -run '^$' -fuzz "^$target\$" -fuzztime "$FUZZTIME" -parallel 1 .) > "$log" 2>&1; then
      echo "$file $target, $FUZZTIME: $(tail -n 1 "$log")"
      return 0
    fi
    grep -q 'context deadline exceeded' "$log" && ! grep -q 'Failing input written' "$log" || break
    echo "$file $target: the fuzzer was stopped by its own clock, without a failing input (try $try)"
  done
  printf '%s %s FAILED\n%s\n' "$file" "$target" "$(cat "$log")"
  return 1
}

step_quickstart() {
  go build -o "$TMP/quickstart" ./examples/quickstart
  "$TMP/quickstart"
  echo
  echo "-- and with connector http, which transfers nothing"
  local status=0
  "$TMP/quickstart" -connector http > "$TMP/quickstart.out" || status=$?
  if [ $status != 1 ]; then
    cat "$TMP/quickstart.out"
    echo "exit status $status in place of 1: it cannot tell reuse from none" >&2
    return 1
  fi
  echo "it noticed that no KV was reused, as it must"
}

step_reliability() {
  [ "$(uname -s)" = Linux ] || skip "its engines have addresses that only Linux gives to loopback"
  go build -o "$TMP/reliability" ./lab/reliability
  "$TMP/reliability" chaos -for 60s
  "$TMP/reliability" soak -requests 2000
  "$TMP/reliability" streams -n 500 -tokens 12 -memory 2000
}

step_bench() {
  [ "$(uname -s)" = Linux ] || skip "it reads CPU times from Linux"
  [ "$(nproc)" -ge 2 ] || skip "it needs two CPUs: one for the gateway, one for clients and engines"
  go test -count=1 -run '^TestAStreamKeepsLittleStack$' ./pdflow # the race detector makes stacks larger
  go run ./internal/tools/hotpaths
  go run ./lab/bench -quick
}

# can_have_engines says what real engines need.
can_have_engines() {
  [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || skip "vLLM for CPU is for Linux on x86-64"
  grep -qw avx2 /proc/cpuinfo || skip "vLLM for CPU needs AVX2"
  command -v gcc >/dev/null || skip "the installation needs a C compiler and binutils"
  command -v python3 >/dev/null || [ -n "${PDKIT_ENGINES_PYTHON:-}" ] || skip "it needs Python 3.11 to 3.14"
}

step_install() {
  can_have_engines
  lab/engines/sglang/install.sh # after vLLM's
}

step_real() {
  can_have_engines
  lab/engines/members.sh
  lab/engines/prove.sh
  if [ $all = yes ]; then
    lab/engines/prove.sh -verify
    lab/engines/prove.sh -encode
    lab/engines/prove.sh -attest
  else
    lab/engines/prove.sh -today
  fi
}

step_faults() {
  [ $real = yes ] || skip "real engines are wanted only with -real"
  can_have_engines
  lab/engines/prove.sh -all
  lab/engines/prove.sh -rescue
}

# ---- running steps

TMP=$(mktemp -d)
BESIDE= # process id of the installations, while they run beside other steps
finish() {
  [ -z "$BESIDE" ] || kill -- "-$BESIDE" 2>/dev/null
  rm -rf "$TMP"
}
trap finish EXIT
trap 'exit 130' INT TERM

# run one step in the foreground and keep what became of it.
run() {
  say "$1"
  measure "$1"
  local status=$?
  [ $status = 0 ] || [ $status = $SKIPPED ] || echo "==> $1 FAILED"
}

# measure writes a step's exit status and seconds, for the table.
measure() {
  local begin=$SECONDS status
  (
    set -e
    STEP=$1
    "step_$1"
  )
  status=$?
  echo "$status $((SECONDS - begin))" > "$TMP/$1.result"
  return $status
}

table() {
  local step status seconds what failed=0
  if ls "$TMP"/tests.* > /dev/null 2>&1; then
    printf '\nthe slowest packages, in seconds\n'
    sed -nE 's/^(ok|FAIL)[[:space:]]+([^[:space:]]+)[[:space:]]+([0-9.]+)s.*/\3 \2/p' "$TMP"/tests.* | sort -rn | head
  fi
  printf '\n%-12s %-8s %7s\n' step result seconds
  for step in $STEPS $NIGHTLY; do
    if [ -f "$TMP/$step.result" ]; then
      read -r status seconds < "$TMP/$step.result"
      case $status in
        0) what=ok ;;
        "$SKIPPED") what=skipped ;;
        *) what=FAILED failed=1 ;;
      esac
      printf '%-12s %-8s %7s  %s\n' "$step" "$what" "$seconds" "$(cat "$TMP/$step.why" 2>/dev/null)"
    elif [ "$named" = no ]; then
      case " $NIGHTLY " in *" $step "*) why="only with -nightly" ;; *) why="only with -real" ;; esac
      printf '%-12s %-8s %7s  %s\n' "$step" skipped - "$why"
    fi
  done
  printf '%-12s %-8s %7s\n' all "$([ $failed = 0 ] && echo ok || echo FAILED)" "$SECONDS"
  return $failed
}

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }

real=no all=no nightly=no named=no wanted=
[ "$CI" = true ] && real=yes
for arg; do
  case $arg in
    -real) real=yes ;;
    -real-all) real=yes all=yes ;;
    -nightly) nightly=yes ;;
    -h | -help | --help) usage; exit 0 ;;
    *)
      case " $STEPS $NIGHTLY " in *" $arg "*) ;; *) echo "no step $arg; there are: $STEPS $NIGHTLY" >&2; exit 2 ;; esac
      named=yes wanted="$wanted $arg"
      ;;
  esac
done
if [ $named = no ]; then
  wanted=$STEPS
  [ $real = yes ] || wanted="${wanted% servers *} ${wanted#* servers }" wanted=${wanted% install real}
  if [ $nightly = yes ]; then
    wanted="$wanted $NIGHTLY"
  elif [ "$CI" = true ]; then
    day=$((10#$(date -u +%j)))
    turns=($TURNS)
    wanted="$wanted ${turns[day % ${#turns[@]}]} fuzz"
    DAY=$day DAY_OF_TURN=$((day / ${#turns[@]}))
    if ! changed=$(git log --since='1 day ago' --format=%h -- '*go.mod' internal/tools/release cmd/images ':!*_test.go') ||
      [ -n "$changed" ]; then
      wanted="$wanted release"
    fi
  fi
fi
command -v go >/dev/null || { echo "Go is not installed: https://go.dev/doc/install" >&2; exit 2; }

wants() { case " $wanted " in *" $1 "*) return 0 ;; esac; return 1; }

# The installations wait for the network, or for a linker, so they run beside whatever does not measure time. They are waited for before
# the steps that do.
if [ "$named" = no ] && wants install; then
  say "servers and install, beside the next steps"
  set -m
  { measure servers & measure install; wait; } > "$TMP/install.log" 2>&1 < /dev/null &
  BESIDE=$!
  set +m
fi
for step in $STEPS $NIGHTLY; do
  wants "$step" || continue
  if [ -n "$BESIDE" ] && { [ "$step" = servers ] || [ "$step" = real ]; }; then
    say "servers and install"
    wait "$BESIDE"
    BESIDE=
    cat "$TMP/install.log"
  fi
  [ -f "$TMP/$step.result" ] && continue
  run "$step"
done
table
