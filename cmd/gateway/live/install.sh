#!/usr/bin/env bash
# Installs Debian's packages for tests that look at what users see: Chromium, in which the live view is opened, and for
# pdctl a terminal (tmux) and the shells that complete its command lines. Needs root, and nothing where all are there.
set -euo pipefail

missing=()
for name in chromium tmux zsh fish; do
  if command -v "$name" >/dev/null; then echo "$name: already there"; else missing+=("$name"); fi
done
if [ ${#missing[@]} = 0 ]; then
  exit 0
fi
if [ "$(id -u)" != 0 ]; then
  echo "install Debian's packages ${missing[*]}, as root" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
get() { apt-get -qq install -y --no-install-recommends fonts-dejavu-core "${missing[@]}" >/dev/null; }
get || { apt-get -qq update && get; }
command -v "${missing[@]}"
