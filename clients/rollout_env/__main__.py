"""`python -m rollout_env`, also as `rollout env`: writes, checks and serves environments, without the service."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from rollout_env.apart import certified_apart
from rollout_env.certificate import Certificate
from rollout_env.certify import PanelSettings
from rollout_env.check import ORDINARY_REPLIES
from rollout_env.loading import EnvironmentNotLoadable, certified_environment, load_environment
from rollout_env.play import run
from rollout_env.scaffold import NotWritten, write_environment
from rollout_env.steps import problems_of
from rollout_env.worth import NotCertified, PolicyServer, posted

HARBOR_TASKS = "deployments.harbor.tasks:HarborTasks"
"""The environment of tasks in Harbor's format, which the package of the service has."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with status 1 if the environment cannot be written, cannot be loaded, or is not certified."""
    options = _parser().parse_args(arguments)
    try:
        text, is_wrong = options.command(options)
    except (NotWritten, EnvironmentNotLoadable, NotCertified) as error:
        sys.exit(str(error))
    except ValidationError as error:
        sys.exit(problems_of(error, "the panel's settings"))
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
    certified = of.add_parser("certify", help="play an environment without a model, and find what cannot be trusted")
    certified.add_argument("environment", help="package.module:Class, a folder of Harbor's, or with --url a task")
    certified.add_argument("--url", help="of a running service, which certifies its task; ROLLOUT_API_KEY has the key")
    certified.add_argument("--reply", action="append", help="one a turn, where the task knows no solution")
    certified.add_argument("--samples", type=int, default=3, help="how many example samples to play")
    certified.add_argument("--seed", type=int, default=0, help="of the example samples")
    certified.add_argument("--random", action="store_true", help="equal replies may earn different rewards")
    certified.add_argument("--best", type=float, help="the reward of a solution, in place of the task's own")
    certified.add_argument("--floor", type=float, help="the most that a player without work may earn")
    certified.add_argument("--step-timeout", type=float, default=60.0, help="seconds that a step may take")
    certified.add_argument(
        "--policy", help="URL with /v1 of a model, which plays the samples too: what are they worth?"
    )
    certified.add_argument("--model", help="of the policy's server, where it has several")
    certified.add_argument("--generations", type=int, default=4, help="of the policy, of each sample")
    certified.add_argument("--band", type=float, nargs=2, default=(0.0, 1.0), help="share of them that must be solved")
    certified.add_argument("--only", action="append", help="make this check alone; may be given several times")
    certified.add_argument("--out", type=Path, help="write the certificate to this file")
    certified.add_argument("--json", action="store_true", help="print the certificate as one JSON document")
    certified.set_defaults(command=_certify_command)
    served = of.add_parser("serve", help="serve an environment over HTTP from a Python environment of its own")
    served.add_argument("import_path", help="package.module:Class, found from this folder too")
    for command in (certified, served):
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


def _certify_command(options: argparse.Namespace) -> tuple[str, bool]:
    settings = PanelSettings(
        samples=options.samples,
        seed=options.seed,
        floor=options.floor,
        best=options.best,
        repeatable=not options.random,
        step_timeout_s=options.step_timeout,
        replies=options.reply or ORDINARY_REPLIES,
        only=options.only or (),
    )
    certificate = _certified_there(options, settings) if options.url else _certified_here(options, settings)
    document = json.dumps(certificate.document(), indent=1)
    if options.out is not None:
        options.out.write_text(f"{document}\n", encoding="utf-8")
    return document if options.json else "\n".join(certificate.table()), not certificate.passed


def _certified_here(options: argparse.Namespace, settings: PanelSettings) -> Certificate:
    sys.path.insert(0, str(Path.cwd()))
    import_path, arguments = options.environment, options.arguments
    if Path(import_path).is_dir():
        import_path, arguments = HARBOR_TASKS, {"settings": {"tasks": str(Path(import_path).resolve()), **arguments}}
    make, policy = certified_environment(import_path, arguments), None
    if options.policy is not None:
        policy = PolicyServer(options.policy, options.model, generations=options.generations, band=tuple(options.band))
    return run(certified_apart(options.environment, make, options.arguments, settings, policy))


def _certified_there(options: argparse.Namespace, settings: PanelSettings) -> Certificate:
    """The certificate of a running service. Raises `NotCertified`."""
    if options.policy is not None:
        raise NotCertified("--policy plays an environment of this machine: leave --url out, or --policy.")
    url = f"{options.url.rstrip('/')}/tasks/{quote(options.environment, safe='')}/certify"
    return Certificate.of(posted(url, settings.model_dump()))


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
