"""The command `rollout`, also as `python -m rollout_client`; says what to install where the `cli` extra is missing."""

import sys


def main() -> None:
    try:
        from rollout_client.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f'The command line needs {error.name}: pip install "rollout-client[cli]"')
    app()


if __name__ == "__main__":
    main()
