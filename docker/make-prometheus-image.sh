#!/bin/sh
# Makes a stand-in for Prometheus' image out of Debian's package, for machines that reach a Debian mirror, but no image
# registry:
#
#     docker/make-prometheus-image.sh [NAME]
#     PROMETHEUS_IMAGE=NAME docker compose -f docker/compose.yaml --profile observability up
#
# NAME is rollout-prometheus:debian unless given. BASE_IMAGE is a Debian, python:3.11-slim-bookworm unless set: the image
# that docker/make-base-image.sh has made. As in Prometheus' own image, the user is nobody and /prometheus is theirs.
set -eu

name=${1:-rollout-prometheus:debian}

docker build --tag "$name" - <<END
FROM ${BASE_IMAGE:-python:3.11-slim-bookworm}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=nobody --group=nogroup /prometheus
USER nobody
WORKDIR /prometheus
EXPOSE 9090
ENTRYPOINT ["/usr/bin/prometheus"]
END
