#!/usr/bin/env bash
# Becomes one vLLM engine on this machine's loopback, with a KV connector over TCP.
#
#   engine.sh prefill|decode|encode PORT SIDE_CHANNEL_PORT [NAME=VALUE ...] [arguments of vllm serve]
#   engine.sh beside PROGRAM [ARGUMENT ...]   becomes a program that runs beside engines, like mooncake_master
#
# The connector is NixlConnector, unless the arguments hold a --kv-transfer-config; NAME=VALUE is put into the engine's environment.
# An encode engine has no KV connector.
#
#   PDKIT_ENGINES_DIR   where install.sh put everything (default: .engines in the root of the repository)
#   PDKIT_MODEL         the model's folder (default: the one that install.sh made)
#   PDKIT_LEASE         how many seconds P keeps KV that nobody has read (default: the engine's own, 30)
set -euo pipefail

ROLE=${1:?usage: engine.sh prefill|decode|encode PORT SIDE_CHANNEL_PORT [NAME=VALUE ...] [arguments of vllm serve]}
case $ROLE in
  prefill) KV_ROLE=kv_producer ;;
  decode) KV_ROLE=kv_consumer ;;
  encode) KV_ROLE=none ;;
  beside) ;;
  *) echo "engine: no role $ROLE" >&2; exit 2 ;;
esac
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${PDKIT_ENGINES_DIR:-$HERE/../../.engines}
[ -f "$DIR/.done" ] || { echo "engine: nothing installed; run install.sh first" >&2; exit 2; }
DIR=$(cd "$DIR" && pwd)
[ ! -d "$DIR/lib" ] || export LD_LIBRARY_PATH=$DIR/lib # Mooncake's libibverbs, where the system has none
export DO_NOT_TRACK=1 PYTHONHASHSEED=0
if [ "$ROLE" = beside ]; then exec "$DIR/venv/bin/python" "$DIR/venv/bin/$2" "${@:3}"; fi
PORT=$2 SIDE=$3
shift 3

EXTRA=${PDKIT_LEASE:+\"kv_lease_duration\": $PDKIT_LEASE}
# The default policy, written out: an engine that cannot load KV fails the request, it does not compute in silence.
TRANSFER="{\"kv_connector\": \"NixlConnector\", \"kv_role\": \"$KV_ROLE\", \"kv_buffer_device\": \"cpu\",
  \"kv_load_failure_policy\": \"fail\", \"kv_connector_extra_config\": {$EXTRA}}"
case "$ROLE $* " in encode*|*" --kv-transfer-config"*) ;; *) set -- "$@" --kv-transfer-config "$TRANSFER" ;; esac

for name in "${!VLLM_@}"; do unset "$name"; done # nothing of the caller's may change what is proven
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export VLLM_HOST_IP=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$SIDE
export UCX_TLS=tcp UCX_NET_DEVICES=lo
export NIXL_PTHR_DELAY_US=1000           # see install.sh: an idle engine must not burn a core
export VLLM_ENABLE_V1_MULTIPROCESSING=0  # one process less per engine: 15 s and 1 GB less
export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH=$HERE/plugins MC_FORCE_TCP=true
ARGS=()
for arg; do
  if [[ $arg =~ ^[A-Z][A-Z0-9_]*= ]]; then export "${arg?}"; else ARGS+=("$arg"); fi
done

# vLLM puts the model's name, as it stands here, into the hash of an image: engines with folders of their own must have the
# same name for the model.
MODEL=$DIR/model
[ -z "${PDKIT_MODEL:-}" ] || { cd "$(dirname "$PDKIT_MODEL")"; MODEL=$(basename "$PDKIT_MODEL"); }

# float32: KV that was computed here and KV that came from elsewhere must not differ in a rounding.
exec "$DIR/venv/bin/python" "$DIR/venv/bin/vllm" serve "$MODEL" --served-model-name tiny \
  --host 127.0.0.1 --port "$PORT" --dtype float32 --enforce-eager --distributed-executor-backend uni \
  --max-model-len 1024 --block-size 32 --kv-cache-memory-bytes $((64 << 20)) \
  --enable-prompt-tokens-details --enable-scale-out "${ARGS[@]}"
