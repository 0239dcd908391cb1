#!/usr/bin/env bash
# Builds the Kubernetes servers that the tests of this package talk to (etcd, kube-apiserver, kube-controller-manager), and helm, from
# the Go modules pinned in servers/ beside this file, and fetches the Gateway API's definition of a route.
#
#   install.sh [DIR]     DIR: .tools/kubernetes in the root of the repository
#
# A finished installation is known by DIR/.done; then nothing is done. Needs Go, 3 GB of disk for Go's caches, and the first time
# about 5 minutes on two cores.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-$HERE/../../../.tools/kubernetes}
GATEWAY_API=v1.6.3
VERSION=$(sed -n 's#^\tk8s.io/kubernetes v\([0-9.]*\)$#\1#p' "$HERE/servers/go.mod")
STAMP=$(cd "$HERE/servers" && { go env GOVERSION; cat go.mod go.sum main.go; echo $GATEWAY_API; } | cksum)

if [ -f "$DIR/.done" ] && [ "$(cat "$DIR/.done")" = "$STAMP" ] && [ -x "$DIR/kubeservers" ]; then
  echo "kubernetes servers: already there"
  exit 0
fi
rm -rf "$DIR"
mkdir -p "$DIR"
OUT=$(cd "$DIR" && pwd)/kubeservers
# Their modules are the servers', not the project's: the workspace must not mix the two. The version is asked of the
# build, and clients look at it. Optimizations would take a fifth more time here, and save none in the tests.
(cd "$HERE/servers" && GOWORK=off GOFLAGS=-mod=readonly CGO_ENABLED=0 go build -trimpath -buildvcs=false \
  -gcflags='all=-N -l' -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$VERSION" -o "$OUT" .)
"$OUT" kube-apiserver --version
"$OUT" helm version --short
API=$(cd "$DIR" && GOWORK=off GOFLAGS=-mod=mod go mod download -json "sigs.k8s.io/gateway-api@$GATEWAY_API" |
  sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
install -m 644 "$API/config/crd/standard/gateway.networking.k8s.io_httproutes.yaml" "$DIR/httproutes.yaml"
echo "$STAMP" > "$DIR/.done"
