#!/usr/bin/env bash
# Proves with real vLLM engines that the gateway lets one engine prefill and another decode, without computing twice.
#
#   prove.sh [-all] [CONNECTOR]     CONNECTOR: the gateway's kvConnector.type (default: nixl)
#
# Installs the engines if need be (see install.sh), starts two of them and the gateway, and prints the proof. The exit
# status is 0 only if KV was really reused: with connector http it is 1. With -all it also shows that http is found out,
# and plays the faults.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
examples/vllm/install.sh
exec go run ./examples/vllm/prove "$@"
