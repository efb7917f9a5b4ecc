#!/bin/sh
# Runs an agent in a container of its own, as the command of a task's agent (docs/agents.md):
#
#     docker/run-agent.sh IMAGE PROGRAM [ARGUMENT]...
#
# Any options of `docker run` may stand before IMAGE, such as --memory=2g. The container has the network of this
# machine, to reach the service, and of its files the folder of the run alone, under the same path.
set -eu

name=rollout-agent-$(basename "$PWD")
replica=$PPID

# A replica that is killed takes this process with it, but not the container, which Docker runs.
(
    while kill -0 "$replica"; do sleep 1; done
    docker rm --force "$name"
) >/dev/null 2>&1 &

exec docker run --rm --init --interactive --name="$name" --network=host \
    --user="$(id -u):$(id -g)" --volume="$PWD:$PWD" --workdir="$PWD" \
    --env=OPENAI_BASE_URL --env=OPENAI_API_KEY --env=ANTHROPIC_BASE_URL --env=ANTHROPIC_API_KEY \
    --env=ROLLOUT_SAMPLE_FILE --env=ROLLOUT_REWARD_FILE "$@"
