#!/bin/sh
# Makes a stand-in for the base image of docker/Dockerfile out of Debian packages, for machines that reach a Debian
# mirror and a package index, but no image registry:
#
#     sudo --preserve-env docker/make-base-image.sh [NAME]
#
# NAME is python:3.11-slim-bookworm unless given, so that the Dockerfile and compose.yaml find the stand-in without
# being told. Needs debootstrap, a running Docker daemon, and root. Read from the environment:
#
#     DEBIAN_MIRROR   another mirror than debootstrap's own
#     SSL_CERT_FILE   the certificate authorities that the image trusts; this machine's own bundle unless set
set -eu

name=${1:-python:3.11-slim-bookworm}
certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
python=/usr/local/bin

[ "$(id -u)" = 0 ] || { echo "$0: debootstrap needs root" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "$0: debootstrap is missing (apt-get install debootstrap)" >&2; exit 1; }
docker version >/dev/null || { echo "$0: no Docker daemon answers" >&2; exit 1; }

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
trap 'exit 1' INT TERM
# mktemp leaves it closed to others, and it becomes the image's /.
chmod 755 "$root"

# Debian's Python is 3.11.2: below 3.11.3 redis asks for async-timeout, which the locks, made for the real image, do not have.
packages=ca-certificates,netbase,tzdata,python3,python3-dev,python3-pip,python3-venv,python3-async-timeout
debootstrap --variant=minbase --include="$packages" \
    bookworm "$root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}

# The real image has its own Python under /usr/local, which nothing but pip manages.
rm "$root"/usr/lib/python3.11/EXTERNALLY-MANAGED
ln -s /usr/bin/python3.11 "$root$python/python3.11"
ln -s python3.11 "$root$python/python3"
ln -s python3.11 "$root$python/python"

# A build sees nothing of this machine, so what it has to trust, and pip's leave to trust it, travel in the image.
trusted=/etc/ssl/certs/ca-certificates.crt
cat "$certificates" > "$root$trusted"
printf '[global]\ncert = %s\n' "$trusted" > "$root/etc/pip.conf"

rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar --create --directory "$root" --numeric-owner . \
    | docker import --change 'CMD ["python3"]' --change "ENV SSL_CERT_FILE=$trusted" - "$name"
