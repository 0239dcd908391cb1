#!/usr/bin/env bash
# Adds SGLang to the folder of ../install.sh, whose Python, torch, Mooncake and model it uses. Installs those first if need be.
#
#   install.sh [DIR]     DIR: $PDKIT_ENGINES_DIR, else .engines in the root of the repository
#
# Makes DIR/sglang: the packages of packages.txt. A finished installation is known by DIR/.done-sglang; then nothing is done.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-${PDKIT_ENGINES_DIR:-$HERE/../../../.engines}}
"$HERE/../install.sh" "$DIR"
# Whatever changes the outcome is in the stamp, so that a change of it installs again.
STAMP="$(cat "$DIR/.done") sglang=$(cat "$HERE"/{install.sh,packages.txt} | sha256sum | cut -c1-16)"
if [ -f "$DIR/.done-sglang" ] && [ "$(cat "$DIR/.done-sglang")" = "$STAMP" ]; then
  echo "install: SGLang is already there"
  exit 0
fi

say() { echo "install: [$SECONDS s] $*"; }

DIR=$(cd "$DIR" && pwd)
rm -rf "$DIR/.done-sglang" "$DIR/sglang"
"$DIR/venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps --target "$DIR/sglang" -r "$HERE/packages.txt"
say "the packages"

# A check that everything loads, which also compiles it for the engines to come.
PYTHONPATH=$HERE:$DIR/sglang LD_LIBRARY_PATH=$DIR/lib SGLANG_USE_CPU_ENGINE=1 "$DIR/venv/bin/python" -W ignore - <<'PY'
import launch  # noqa: F401
import sglang
import sglang.srt.disaggregation.mooncake.conn  # noqa: F401
import sglang.srt.entrypoints.http_server  # noqa: F401
print("install: sglang", sglang.__version__, "on a CPU")
PY
echo "$STAMP" > "$DIR/.done-sglang"
say "done, $(du -sh "$DIR/sglang" | cut -f1) on disk"
