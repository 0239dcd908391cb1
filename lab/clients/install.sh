#!/usr/bin/env bash
# Installs the client libraries that tests of programs ask with: see README.md.
#
#   install.sh [DIR]     DIR: .tools/clients in the root of the repository
#
# Makes DIR a virtual environment of Python (requirements.txt), with Node's packages in DIR/node
# (node/package-lock.json) and the program DIR/bin/openai-go (testdata/openai-go). A finished installation is known by
# DIR/.done; then nothing is done. Node comes from PyPI; curl, where it is missing, from Debian's packages, which needs
# root.
#
#   PDKIT_PYTHON   the Python to use, 3.10 to 3.14 (default: python3, or the first of 3.12, 3.13, 3.11 that has venv)
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-$HERE/../../.tools/clients}
STAMP=$(cd "$HERE" && { go env GOVERSION; cat requirements.txt node/*.json testdata/openai-go/*; } | cksum)

if ! command -v curl >/dev/null; then
  [ "$(id -u)" = 0 ] || { echo "clients: install curl" >&2; exit 1; }
  export DEBIAN_FRONTEND=noninteractive
  get() { apt-get -qq install -y --no-install-recommends curl >/dev/null; }
  get || { apt-get -qq update && get; }
fi

if [ -f "$DIR/.done" ] && [ "$(cat "$DIR/.done")" = "$STAMP" ] &&
  "$DIR/bin/python" -c 'import openai' 2>/dev/null; then
  echo "clients: already there"
  exit 0
fi
find_python() {
  local python
  for python in ${PDKIT_PYTHON:-python3 python3.12 python3.13 python3.11}; do
    if "$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  echo "clients: no Python 3.10 or newer with venv found; set PDKIT_PYTHON" >&2
  return 1
}

PYTHON=$(find_python)
rm -rf "$DIR"
mkdir -p "$(dirname "$DIR")"
"$PYTHON" -m venv "$DIR"
"$DIR/bin/python" -m pip --disable-pip-version-check install -q --only-binary :all: -r "$HERE/requirements.txt"
"$DIR/bin/python" -m pip --disable-pip-version-check check
mkdir "$DIR/node"
cp "$HERE"/node/*.json "$DIR/node"
PATH=$(cd "$DIR/bin" && pwd):$PATH npm ci --prefix "$DIR/node" --ignore-scripts --no-audit --no-fund --loglevel=error
OUT=$(cd "$DIR/bin" && pwd)/openai-go
# Its modules are the client's, not the project's: the workspace must not mix the two.
(cd "$HERE/testdata/openai-go" &&
  GOWORK=off GOFLAGS=-mod=readonly go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$OUT" .)
echo "$STAMP" > "$DIR/.done"
du -sh "$DIR"
