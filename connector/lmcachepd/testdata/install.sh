#!/usr/bin/env bash
# Installs pyzmq and msgspec, with which LMCache sends its notices, for the tests of this package.
#
#   install.sh [DIR]     DIR: .tools/pyzmq in the root of the repository
#
# Makes DIR a virtual environment of Python. A finished installation is known by DIR/.done; then nothing is done.
#
#   PDKIT_PYTHON   the Python to use, 3.10 to 3.14 (default: python3, or the first found of 3.12, 3.13, 3.11 if that has no venv)
set -euo pipefail

PYZMQ=27.2.0
MSGSPEC=0.21.1

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-$HERE/../../../.tools/pyzmq}
STAMP="pyzmq==$PYZMQ msgspec==$MSGSPEC"

if [ -f "$DIR/.done" ] && [ "$(cat "$DIR/.done")" = "$STAMP" ] && "$DIR/bin/python" -c 'import zmq, msgspec' 2>/dev/null; then
  echo "pyzmq: already there"
  exit 0
fi
find_python() {
  local python
  for python in ${PDKIT_PYTHON:-python3 python3.12 python3.13 python3.11}; do
    if "$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then echo "$python"; return; fi
  done
  echo "pyzmq: no Python 3.10 or newer with venv found; set PDKIT_PYTHON" >&2
  return 1
}

PYTHON=$(find_python)
rm -rf "$DIR"
mkdir -p "$(dirname "$DIR")"
"$PYTHON" -m venv "$DIR"
# Wheels only: a build from source would need a compiler, and another libzmq.
"$DIR/bin/python" -m pip --disable-pip-version-check install -q --only-binary :all: $STAMP
"$DIR/bin/python" -c 'import zmq, msgspec; print("pyzmq", zmq.__version__, "libzmq", zmq.zmq_version(), "msgspec", msgspec.__version__)'
echo "$STAMP" > "$DIR/.done"
