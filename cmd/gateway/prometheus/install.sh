#!/usr/bin/env bash
# Unpacks Debian's Prometheus, whose promtool and server the tests of the gateway's rules run.
#
#   install.sh [DIR]     DIR: .tools/prometheus in the root of the repository
#
# A finished installation is known by DIR/.done; then nothing is done. Needs apt-get and dpkg, and no rights.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-$HERE/../../../.tools/prometheus}

if [ -f "$DIR/.done" ] && "$DIR/promtool" --version >/dev/null 2>&1; then
  echo "prometheus: already there"
  exit 0
fi
rm -rf "$DIR"
mkdir -p "$DIR/deb"
cd "$DIR/deb"
get() { apt-get -qq -o APT::Sandbox::User="$(id -un)" download prometheus; }
get || { apt-get -qq update && get; }
dpkg -x prometheus_*.deb .
mv usr/bin/prometheus usr/bin/promtool ..
cd ..
rm -rf deb
./prometheus --version
touch .done
