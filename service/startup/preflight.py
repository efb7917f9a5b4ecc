"""Finds what would keep a config from starting, before Ray is started. Collects all that is wrong."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.agents.game_program import load_game
from deployments.agents.programs import AgentNotLoadable, CallableProgram
from deployments.agents.settings import AgentSettings
from deployments.data.rows import DataNotLoadable
from deployments.data.store import load_task_data
from deployments.generation.card_share import CardTooSmall, with_share_of_card
from deployments.generation.settings import EngineSettings, engine_fields
from deployments.harbor.tasks import HarborTaskRefused, tasks_within
from deployments.sandbox.providers.interface import ProviderUnusable, open_provider
from deployments.strict_settings import KeyMissing, bearer_headers
from rollout_env.environment import has_a_start, has_a_user
from rollout_env.loading import EnvironmentNotLoadable, checked_arguments, load_environment_class
from service.access.access_control import AccessControl, KeysNotReadable, ServiceExposed, refuse_exposed
from service.settings import AccessSettings, EnvironmentSettings, ServiceSettings
from service.startup.config import APP_BUILDER, REPOSITORY, ServiceNotStarted, problem_line


def check_config(config: ServeDeploySchema) -> None:
    """Checks settings, import paths, models and keys.

    Raises:
        ServiceNotStarted: the service cannot start with this config; the message holds everything that is wrong.
    """
    problems: list[str] = []
    for application in (each for each in config.applications if each.import_path == APP_BUILDER):
        try:
            settings = ServiceSettings.model_validate(application.args)
        except ValidationError as error:
            problems.append(f"The settings of {application.name} are wrong:")
            problems += [problem_line(each, "args") for each in error.errors()]
            continue
        problems += _problems_of(application, settings)
        problems += _access_problems(settings.access, config.http_options)
    if problems:
        raise ServiceNotStarted("\n".join(problems))


def _problem(at: str, check: Callable[[], object], *errors: type[Exception]) -> Iterator[str]:
    """The problem with the field `at`, where the check raises one of these errors."""
    try:
        check()
    except errors as error:
        yield f"{at}: {error}"


def _problems_of(application: ServeApplicationSchema, settings: ServiceSettings) -> Iterator[str]:
    """One text for each thing that would not start."""
    known = [*settings.ray_actor_options()]
    for name in (entry.name for entry in application.deployments if entry.name not in known):
        yield f"deployments: {name} is not a deployment of {application.name}; there are {', '.join(known)}."
    yield from _engine_problems(settings.engine)
    if application.runtime_env:
        return  # Packages of its own are there only where a replica runs.
    for task_name, environment in settings.environments.items():
        at = f"args.environments.{task_name}"
        for name, model in environment.all_models.items():
            yield from _key_problem(f"{at}.{name}", model.api_key_variable)
        yield from _environment_problems(at, task_name, environment)
        if environment.agent is not None:
            yield from _agent_problems(f"{at}.agent", environment.agent)


def _environment_problems(at: str, task_name: str, environment: EnvironmentSettings) -> Iterator[str]:
    try:
        environment_class = load_environment_class(environment.import_path)
        checked_arguments(environment_class, environment.arguments, environment.import_path)
    except EnvironmentNotLoadable as error:
        yield f"{at}: {error}"
        return
    if environment.user_simulator is not None and not has_a_user(environment_class):
        yield (
            f"{at}.user_simulator: {environment.import_path} talks to no user (it has no use_user): leave it out, or "
            "name deployments.tasks.conversation:ConversationEnvironment with this one as its judge."
        )
    if (data := environment.data) is not None:
        info, starts = environment_class.ExtraEnvInfo, has_a_start(environment_class)
        yield from _problem(f"{at}.data", lambda: load_task_data(task_name, data, info, starts), DataNotLoadable)


def _agent_problems(at: str, agent: AgentSettings) -> Iterator[str]:
    """The reasons why the agent could not run, as far as this machine shows them."""
    if (import_path := agent.import_path) is not None:
        offers = ("sandbox",) if agent.harbor is not None else ()
        yield from _problem(f"{at}.import_path", lambda: CallableProgram(import_path, offers), AgentNotLoadable)
    if (game := agent.game) is not None:
        yield from _problem(f"{at}.game", lambda: load_game(game), AgentNotLoadable)
    if agent.harness is not None:
        yield from _key_problem(f"{at}.harness", agent.harness.api_key_variable)
    if (harbor := agent.harbor) is not None:
        yield from _problem(f"{at}.harbor.tasks", lambda: tasks_within(harbor, agent.timeout_s), HarborTaskRefused)
        yield from _sandbox_problem(f"{at}.harbor", harbor.sandbox.provider, harbor.sandbox.options)
    elif (command := agent.command) is not None:
        if command.sandbox:
            yield from _sandbox_problem(f"{at}.command", "local", {})
        if shutil.which(program := command.argv[0]) is None:
            yield f"{at}.command.argv: there is no program {program!r}; give its whole path, or put it into PATH."


def _key_problem(at: str, variable: str | None) -> Iterator[str]:
    return _problem(f"{at}.api_key_variable", lambda: bearer_headers(variable), KeyMissing)


def _sandbox_problem(at: str, provider: str, options: Mapping[str, Any]) -> Iterator[str]:
    return _problem(f"{at}.sandbox", lambda: open_provider(provider, options).close(), ProviderUnusable)


def _engine_problems(engine: EngineSettings) -> Iterator[str]:
    for field, name in {"model": engine.model, "tokenizer": engine.tokenizer}.items():
        # Any other name may be that of a remote model.
        if name is not None and name.startswith(("/", ".", "~")) and not (REPOSITORY / name).exists():
            yield f"args.engine.{field}: there is no {name} on this machine."
    if engine.replica is not None:
        return
    yield from _problem("args.engine", lambda: with_share_of_card(engine), CardTooSmall)
    permitted = engine_fields()
    if permitted is None:
        yield "vLLM is not installed in this Python environment: install rollout-service[gpu] or rollout-service[cpu]."
        return
    for name in (engine.model_extra or {}).keys() - permitted:
        own = ", ".join(EngineSettings.model_fields)
        yield f"args.engine.{name}: unknown; permitted are {own} and the fields of vLLM's AsyncEngineArgs."


def _access_problems(access: AccessSettings, options: HTTPOptionsSchema) -> Iterator[str]:
    try:
        refuse_exposed(access, options)
        AccessControl.of(access)
    except (KeysNotReadable, ServiceExposed) as error:
        yield str(error)
