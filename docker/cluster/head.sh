#!/bin/sh
# Ray's head, which runs no replica, then the service on the whole cluster. The other nodes read the token from the volume that all of them share.
set -eu
if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    (umask 077 && ray get-auth-token --generate > /dev/null)
fi
ray start --head --port=6379 --num-cpus=0 --object-store-memory=1000000000 --disable-usage-stats
exec serve run /app/serve_config.cluster.yaml
