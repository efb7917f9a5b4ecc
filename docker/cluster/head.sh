#!/bin/sh
# Ray's head, which runs no replica, then the service on the whole cluster. The other nodes read the token from the volume that all of them share.
set -eu
if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    # Not by `ray get-auth-token --generate`, which fails while RAY_AUTH_TOKEN_PATH names a file that is not there. Whole, or not at all.
    (umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH.new")
    mv "$RAY_AUTH_TOKEN_PATH.new" "$RAY_AUTH_TOKEN_PATH"
fi
ray start --head --port=6379 --num-cpus=0 --object-store-memory=1000000000 --disable-usage-stats
exec serve run /app/serve_config.cluster.yaml
