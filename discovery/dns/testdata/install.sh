#!/usr/bin/env bash
# Builds the CoreDNS that the tests of this package ask, from the Go modules pinned in coredns/ beside this file.
#
#   install.sh [DIR]     DIR: .tools/coredns in the root of the repository
#
# A finished installation is known by DIR/.done; then nothing is done. Needs Go, and about a minute the first time.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-$HERE/../../../.tools/coredns}
STAMP=$(cd "$HERE/coredns" && { go env GOVERSION; cat go.mod go.sum main.go; } | cksum)

if [ -f "$DIR/.done" ] && [ "$(cat "$DIR/.done")" = "$STAMP" ] && [ -x "$DIR/coredns" ]; then
  echo "coredns: already there"
  exit 0
fi
rm -rf "$DIR"
mkdir -p "$DIR"
OUT=$(cd "$DIR" && pwd)/coredns
# Its modules are the server's, not the project's: the workspace must not mix the two.
(cd "$HERE/coredns" && GOWORK=off GOFLAGS=-mod=readonly go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$OUT" .)
"$OUT" -version
echo "$STAMP" > "$DIR/.done"
