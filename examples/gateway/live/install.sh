#!/usr/bin/env bash
# Installs Debian's Chromium, in which the tests of the live view open the page. Needs root, and nothing where it is
# there already.
set -euo pipefail

if command -v chromium >/dev/null; then
  echo "chromium: already there"
  exit 0
fi
if [ "$(id -u)" != 0 ]; then
  echo "chromium: install Debian's package chromium, as root" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
get() { apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; }
get || { apt-get -qq update && get; }
chromium --version
