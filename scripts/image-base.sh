#!/usr/bin/env bash
# Makes the Dockerfile's base image (NODE_IMAGE, node:24-slim) where no image registry can be reached: Debian from
# debootstrap, Node and npm from npm packages, and this machine's certificates, so that `npm ci` works inside.
# Everybody else pulls the real one and never runs this. As root, with Docker, debootstrap and npm:
#
#   apt-get install docker.io iptables debootstrap
#   dockerd --iptables=false --bridge=none &
#   bash scripts/image-base.sh
#   bash scripts/image-test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

IMAGE=${NODE_IMAGE:-node:24-slim}
# The version that package.json tests with.
VERSION=$(sed -n 's/^ *"node": "\([0-9.]*\)",*$/\1/p' package.json)
case $(uname -m) in
  x86_64) ARCH=x64 ;;
  aarch64) ARCH=arm64 ;;
  *) echo "no node-linux package for $(uname -m)" >&2; exit 1 ;;
esac

if docker image inspect "$IMAGE" >/dev/null 2>&1; then
  echo "$IMAGE is already there"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "making $IMAGE: Debian bookworm, Node $VERSION"
debootstrap --variant=minbase --include=ca-certificates bookworm "$work/root" >"$work/debootstrap.log" 2>&1 ||
  { tail -20 "$work/debootstrap.log" >&2; exit 1; }
(cd "$work" && npm pack --silent "node-linux-$ARCH@$VERSION" npm@11 >/dev/null)
mkdir "$work/node" "$work/npm"
tar -xzf "$work"/node-linux-*.tgz -C "$work/node" --strip-components=1
tar -xzf "$work"/npm-*.tgz -C "$work/npm" --strip-components=1
cp "$work/node/bin/node" "$work/root/usr/local/bin/node"
mkdir -p "$work/root/usr/local/lib/node_modules"
cp -r "$work/npm" "$work/root/usr/local/lib/node_modules/npm"
chmod +x "$work"/root/usr/local/lib/node_modules/npm/bin/*-cli.js
ln -s ../lib/node_modules/npm/bin/npm-cli.js "$work/root/usr/local/bin/npm"
ln -s ../lib/node_modules/npm/bin/npx-cli.js "$work/root/usr/local/bin/npx"
cp /etc/ssl/certs/ca-certificates.crt "$work/root/etc/ssl/certs/ca-certificates.crt"
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
tar -C "$work/root" -c . | docker import \
  -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
  -c 'ENV NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt' \
  -c 'CMD ["node"]' - "$IMAGE" >/dev/null
docker run --rm --network host "$IMAGE" node --version
