#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the gateways that lab/bench -peers measures beside pdkit's.
#
#   install.sh [DIR]     DIR: .tools/peers in the root of the repository
#
# Makes DIR a virtual environment of Python. A finished installation is known by DIR/.done; then nothing is done.
# Needs 240 MB, and some 40 s the first time.
#
#   PDKIT_PYTHON   the Python to use, 3.10 to 3.14 (default: python3, or the first of 3.12, 3.13, 3.11 that has venv)
set -euo pipefail

VLLM_ROUTER=0.1.17
SMG=1.13.0
SETPROCTITLE=1.3.8

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-$HERE/../../../.tools/peers}
STAMP="vllm-router==$VLLM_ROUTER smg==$SMG setproctitle==$SETPROCTITLE"

if [ -f "$DIR/.done" ] && [ "$(cat "$DIR/.done")" = "$STAMP" ] && "$DIR/bin/smg" --version > /dev/null 2>&1; then
  echo "peers: already there"
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
  echo "peers: no Python 3.10 or newer with venv found; set PDKIT_PYTHON" >&2
  return 1
}

PYTHON=$(find_python)
rm -rf "$DIR"
mkdir -p "$(dirname "$DIR")"
"$PYTHON" -m venv "$DIR"
pip() { "$DIR/bin/python" -m pip --disable-pip-version-check install -q --only-binary :all: "$@"; }
# Both are programs in Rust with a launcher in Python. vllm-router's launcher imports all that it requires (fastapi and
# others, for another mode). smg's imports only setproctitle: gRPC is for `smg serve`, which starts engines.
pip "vllm-router==$VLLM_ROUTER" "setproctitle==$SETPROCTITLE"
pip --no-deps "smg==$SMG"
"$DIR/bin/vllm-router" --help > /dev/null
"$DIR/bin/smg" launch --help > /dev/null
echo "vllm-router $VLLM_ROUTER, $("$DIR/bin/smg" --version)"
echo "$STAMP" > "$DIR/.done"
