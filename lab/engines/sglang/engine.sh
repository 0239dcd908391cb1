#!/usr/bin/env bash
# Becomes one SGLang engine on this machine's loopback, which sends and takes KV by Mooncake over TCP.
#
#   engine.sh prefill|decode|alone PORT BOOTSTRAP_PORT [NAME=VALUE ...] [arguments of sglang.launch_server]
#
# The disaggregation is Mooncake's, unless the arguments hold a --disaggregation-mode; alone has none. BOOTSTRAP_PORT is where
# a prefill engine's bootstrap server listens. NAME=VALUE is put into the engine's environment.
#
#   PDKIT_ENGINES_DIR   where install.sh put everything (default: .engines in the root of the repository)
set -euo pipefail

ROLE=${1:?usage: engine.sh prefill|decode|alone PORT BOOTSTRAP_PORT [NAME=VALUE ...] [arguments of sglang.launch_server]}
PORT=$2 BOOTSTRAP=$3
shift 3
BACKEND=(--disaggregation-transfer-backend mooncake_tcp)
case $ROLE in
  prefill) MODE=(--disaggregation-mode prefill --disaggregation-bootstrap-port "$BOOTSTRAP" "${BACKEND[@]}") ;;
  decode) MODE=(--disaggregation-mode decode "${BACKEND[@]}") ;;
  alone) MODE=() ;;
  *) echo "engine: no role $ROLE" >&2; exit 2 ;;
esac
case " $* " in *" --disaggregation-mode "*) MODE=() ;; esac
# What D does with KV that it must give up for a while. The default keeps it in pinned memory.
[ "$ROLE" != decode ] || MODE+=(--disaggregation-decode-retraction-backup cpu_tensor)
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${PDKIT_ENGINES_DIR:-$HERE/../../../.engines}
[ -f "$DIR/.done-sglang" ] || { echo "engine: nothing installed; run install.sh first" >&2; exit 2; }
DIR=$(cd "$DIR" && pwd)

for name in "${!SGLANG_@}"; do unset "$name"; done # nothing of the caller's may change what is proven
export SGLANG_USE_CPU_ENGINE=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONHASHSEED=0
export PYTHONPATH=$DIR/sglang
[ ! -d "$DIR/lib" ] || export LD_LIBRARY_PATH=$DIR/lib # Mooncake's libibverbs, where the system has none
ARGS=()
for arg; do
  if [[ $arg =~ ^[A-Z][A-Z0-9_]*= ]]; then export "${arg?}"; else ARGS+=("$arg"); fi
done

# float32: KV that was computed here and KV that came from elsewhere must not differ in a rounding.
exec "$DIR/venv/bin/python" "$HERE/launch.py" --model-path "$DIR/model" --served-model-name tiny \
  --host 127.0.0.1 --port "$PORT" --device cpu --dtype float32 \
  --attention-backend torch_native --sampling-backend pytorch --grammar-backend none \
  --max-total-tokens 8192 --mem-fraction-static 0.1 --page-size 1 --max-running-requests 8 \
  --skip-server-warmup --enable-metrics "${MODE[@]}" "${ARGS[@]}"
