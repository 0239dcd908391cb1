#!/usr/bin/env bash
# Proves with real engines of vLLM and SGLang that the gateway lets one engine prefill and another decode, without
# computing twice.
#
#   prove.sh [-all] [CONNECTOR]         CONNECTOR: the gateway's kvConnector.type (default: nixl)
#   prove.sh -rescue                    streams that are broken after each of their tokens go on byte for byte
#   prove.sh -encode                    an encode engine before prefill and decode, with images
#   prove.sh -attest                    flipped bytes in ExampleConnector's files, found by synthetic probes
#   prove.sh -verify [CONNECTOR ...]    engines of each connector that runs on a CPU, judged by pdctl verify
#   prove.sh -today                     the same for lmcache, and for two others by the day of the year
#
# Installs the engines if need be (see install.sh; sglang/install.sh for sglang), starts two of them and the gateway, and
# prints the proof. Exit status: 0 when KV was reused, 1 when not (as with connector http), 2 when it could not be tried. With
# -all it also shows that http is found out, and plays the faults.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
lab/engines/install.sh
DIR=${PDKIT_ENGINES_DIR:-.engines}
go build -o "$DIR/prove" ./lab/engines/prove # not go run, which turns every exit status into 1
exec "$DIR/prove" "$@"
