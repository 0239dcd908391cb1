#!/usr/bin/env bash
# Installs the client libraries of OpenAI and Anthropic for Python, which tests of the examples ask with.
#
#   install.sh [DIR]     DIR: .tools/clients in the root of the repository
#
# Makes DIR a virtual environment of Python. A finished installation is known by DIR/.done; then nothing is done.
#
#   PDKIT_PYTHON   the Python to use, 3.10 to 3.14 (default: python3, or the first of 3.12, 3.13, 3.11 that has venv)
set -euo pipefail

OPENAI=3.54.0
ANTHROPIC=2.12.0

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-$HERE/../../.tools/clients}
STAMP="openai==$OPENAI anthropic==$ANTHROPIC"

if [ -f "$DIR/.done" ] && [ "$(cat "$DIR/.done")" = "$STAMP" ] && "$DIR/bin/python" -c 'import openai, anthropic' 2>/dev/null; then
  echo "clients: already there"
  exit 0
fi
find_python() {
  local python
  for python in ${PDKIT_PYTHON:-python3 python3.12 python3.13 python3.11}; do
    if "$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then echo "$python"; return; fi
  done
  echo "clients: no Python 3.10 or newer with venv found; set PDKIT_PYTHON" >&2
  return 1
}

PYTHON=$(find_python)
rm -rf "$DIR"
mkdir -p "$(dirname "$DIR")"
"$PYTHON" -m venv "$DIR"
"$DIR/bin/python" -m pip --disable-pip-version-check install -q --only-binary :all: $STAMP
"$DIR/bin/python" -c 'import openai, anthropic; print("openai", openai.__version__, "anthropic", anthropic.__version__)'
echo "$STAMP" > "$DIR/.done"
