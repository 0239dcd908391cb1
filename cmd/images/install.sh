#!/usr/bin/env bash
# Installs Debian's podman and runc, with which the tests run the images. Needs root, and nothing where they are there.
set -euo pipefail

if command -v podman >/dev/null && command -v runc >/dev/null; then
  echo "podman and runc: already there"
  exit 0
fi
if [ "$(id -u)" != 0 ]; then
  echo "images: install Debian's packages podman and runc, as root" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
get() { apt-get -qq install -y --no-install-recommends podman runc >/dev/null; }
get || { apt-get -qq update && get; }
podman --version
runc --version
