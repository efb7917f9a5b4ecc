"""`python -m rollout_env`, also as `rollout env`: writes, checks and serves environments, without the service."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rollout_env.check import ORDINARY_REPLIES, CheckFailed, Finding, check
from rollout_env.loading import EnvironmentNotLoadable, load_environment, load_environment_class
from rollout_env.scaffold import NotWritten, write_environment


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with status 1 if the environment cannot be written, cannot be loaded, or breaks a rule."""
    options = _parser().parse_args(arguments)
    try:
        text, is_wrong = options.command(options)
    except (NotWritten, EnvironmentNotLoadable, CheckFailed) as error:
        sys.exit(str(error))
    sys.stdout.write(f"{text}\n")
    if is_wrong:
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser(prog="rollout env", description="Writes and checks environments.")
    of = commands.add_subparsers(required=True, metavar="COMMAND")
    init = of.add_parser("init", help="write a new environment with its test")
    init.add_argument("name", help="of the module and of the task, such as number_game")
    init.add_argument("--folder", type=Path, default=Path(), help="where to write it; by default here")
    init.add_argument("--json", action="store_true", help="print one JSON document")
    init.set_defaults(command=_init_command)
    checked = of.add_parser("check", help="play an environment against scripted replies and find what is wrong")
    checked.add_argument("--reply", action="append", help="of the model, one a turn; may be given several times")
    checked.add_argument("--samples", type=int, default=3, help="how many example samples to play")
    checked.add_argument("--seed", type=int, default=0, help="of the example samples")
    checked.add_argument("--random", action="store_true", help="equal replies may give different outcomes")
    checked.add_argument("--json", action="store_true", help="print the findings as one JSON document")
    checked.set_defaults(command=_check_command)
    served = of.add_parser("serve", help="serve an environment over HTTP from a Python environment of its own")
    for command in (checked, served):
        command.add_argument("import_path", help="package.module:Class, found from this folder too")
        command.add_argument("--arguments", type=_json_object, default={}, help="of the constructor, as a JSON object")
    served.add_argument("--socket", help="path of a Unix socket, in place of host and port")
    served.add_argument("--host", default="127.0.0.1", help="only who is trusted may reach it: it asks for no token")
    served.add_argument("--port", type=int, default=8100)
    served.add_argument("--until-input-ends", action="store_true", help="end with the process that started this one")
    served.set_defaults(command=_serve_command)
    return commands


def _init_command(options: argparse.Namespace) -> tuple[str, bool]:
    written = write_environment(options.name, options.folder)
    document = {"import_path": written.import_path, "files": list(map(str, written.files))}
    return json.dumps(document, indent=1) if options.json else written.next_steps, False


def _check_command(options: argparse.Namespace) -> tuple[str, bool]:
    sys.path.insert(0, str(Path.cwd()))
    load_environment_class(options.import_path)
    make = partial(load_environment, options.import_path, options.arguments)
    findings: list[Finding] = []
    try:
        check(
            make, options.reply or ORDINARY_REPLIES, options.samples, seed=options.seed, repeatable=not options.random
        )
    except CheckFailed as failed:
        if not options.json:
            raise
        findings = failed.findings
    if not options.json:
        return f"{options.import_path} keeps the rules: {options.samples} samples were played.", False
    document = {"import_path": options.import_path, "samples": options.samples, "findings": [*map(asdict, findings)]}
    return json.dumps(document, indent=1), bool(findings)


def _serve_command(options: argparse.Namespace) -> tuple[str, bool]:
    # It needs packages that the other commands do not need.
    from rollout_env.serve import serve

    sys.path.insert(0, str(Path.cwd()))
    environment = load_environment(options.import_path, options.arguments)
    serve(environment, options.socket, options.host, options.port, options.until_input_ends)
    return "The server has ended.", False


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


if __name__ == "__main__":
    main()
