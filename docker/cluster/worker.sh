#!/bin/sh
# A further node of Ray, as soon as the head has made the token.
set -eu
until [ -s "$RAY_AUTH_TOKEN_PATH" ]; do sleep 1; done
exec ray start --address=ray-head:6379 --num-cpus="$RAY_WORKER_CPUS" --object-store-memory=1000000000 \
    --disable-usage-stats --block
