"""The command `rollout`, also as `python -m rollout_client`; says what to install where the `cli` extra is missing."""

import logging
import sys


def main() -> None:
    try:
        from rollout_client.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f'The command line needs {error.name}: pip install "rollout-client[cli]"')
    # The command prints one sentence when it fails, not one for each attempt. A process decides on its own logging: a
    # caller of `app` in another process keeps its settings.
    logging.getLogger("rollout_client").setLevel(logging.ERROR)
    app()


if __name__ == "__main__":
    main()
