"""Finds what would keep a config from starting, before Ray is started. Collects all that is wrong."""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from deployments.agents.game_program import load_game
from deployments.agents.programs import AgentNotLoadable, load_agent
from deployments.agents.settings import AgentSettings
from deployments.data.reader import DataNotLoadable
from deployments.data.store import load_task_data
from deployments.generation.settings import EngineSettings, ResponseSettings
from deployments.harbor.tasks import HarborTaskRefused, tasks_within
from deployments.policy.run_identity import RunIdentity
from deployments.sandbox.providers.interface import ProviderUnusable, open_provider
from deployments.sessions.settings import ModelNotRecordable, refuse_unrecordable
from deployments.strict_settings import KeyMissing, bearer_headers
from deployments.upstream.ray_serve.serve_internals import resources_of_this_machine
from deployments.upstream.vllm.source_tables import ParserKind, engine_fields, parser_names
from rollout_env.environment import has_a_start, has_a_user
from rollout_env.loading import EnvironmentNotLoadable, checked_arguments, load_environment_class
from service.access.access_control import AccessControl, KeysNotReadable
from service.access.exposure import ServiceExposed, tls_problem
from service.settings import EnvironmentSettings, ServiceSettings
from service.startup.commands import ServiceNotStarted
from service.startup.config import APP_BUILDER, REPOSITORY, problem_line

_TOLERANCE = 1e-6
"""Amounts are sums of fractions of a core."""
_HINT = (
    "Give a deployment less in its entry under `deployments`, such as `ray_actor_options: {num_cpus: 0.1}`, and the "
    "generator by `engine.num_cpus` and `engine.device`: a reservation is not a limit: a replica may use more."
)


def check_config(config: ServeDeploySchema) -> None:
    """Checks settings, import paths, models, and that the machine has the resources that are asked for.

    Of applications with another builder only the resources are checked.

    Raises:
        ServiceNotStarted: the service cannot start with this config; the message holds everything that is wrong.
    """
    problems: list[str] = []
    demands: list[_Demand] = []
    for application in config.applications:
        settings: ServiceSettings | None = None
        if application.import_path == APP_BUILDER:
            try:
                settings = ServiceSettings.model_validate(application.args)
            except ValidationError as error:
                problems += [
                    f"The settings of {application.name} are wrong:",
                    *(problem_line(each, "args") for each in error.errors()),
                ]
                continue
            problems += _problems_of(application, settings)
            problems += _access_problems(settings, config.http_options.host)
            problems += filter(None, [tls_problem(config.http_options.ssl_certfile)])
        demands += _demands_of(application, settings)
    if not problems and (missing := _missing_resources(demands, resources_of_this_machine())):
        problems.append(missing)
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
    yield from filter(None, [_shared_card_problem(application, settings.engine)])
    yield from _parser_problems(settings.responses)
    if settings.sessions is not None:
        model_type = _local_model_type(settings.engine.model)
        yield from _problem("args.sessions", lambda: refuse_unrecordable(model_type), ModelNotRecordable)
    yield from _policy_problems(settings)
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
        yield from _problem(f"{at}.import_path", lambda: load_agent(import_path, offers), AgentNotLoadable)
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
        if name is not None and (problem := folder_problem(name)):
            yield f"args.engine.{field}: {problem}"
    if engine.replica is not None:
        return
    permitted = engine_fields()
    if permitted is None:
        yield "vLLM is not installed in this Python environment: install rollout-service[gpu] or rollout-service[cpu]."
        return
    for name in (engine.model_extra or {}).keys() - permitted:
        similar = ", such as ".join(["", *get_close_matches(name, permitted, n=1)])
        yield (
            f"args.engine.{name}: unknown; permitted are {', '.join(EngineSettings.model_fields)} and the fields of "
            f"vLLM's AsyncEngineArgs{similar}."
        )


def _parser_problems(responses: ResponseSettings) -> Iterator[str]:
    named: dict[ParserKind, tuple[str, str | None]] = {
        "tool": ("tool_call_parser", responses.tool_call_parser),
        "reasoning": ("reasoning_parser", responses.reasoning_parser),
    }
    for kind, (field, name) in named.items():
        known = parser_names(kind) if name is not None else None
        if known is not None and name not in known:
            yield f"args.responses.{field}: vLLM has no parser {name!r}; it has {', '.join(sorted(known))}."


def _policy_problems(settings: ServiceSettings) -> Iterator[str]:
    """Problems that the policy store would find in its folder, if the folder is on this machine."""
    model = settings.engine.model
    path = REPOSITORY / model
    identity = RunIdentity(settings.policy.run, str(path) if path.is_dir() else model, settings.engine.hub.revision)
    folder = settings.policy.folder
    if folder is not None and (problem := identity.problem_of(Path(folder).expanduser())):
        yield f"args.policy.folder: {folder} {problem}"


def _access_problems(settings: ServiceSettings, host: str) -> Iterator[str]:
    try:
        AccessControl.of(settings.access, host)
    except (KeysNotReadable, ServiceExposed) as error:
        yield str(error)


def _local_model_type(model: str) -> str | None:
    """The type of the model in a local folder; `None` for one of the hub, whose replica says it at its start."""
    try:
        config: Any = json.loads((REPOSITORY / model / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def folder_problem(name: str) -> str | None:
    """The problem with the local path of a model; `None` if it exists, or if the name is that of a remote model."""
    path = REPOSITORY / name
    if (path / "__main__.py").is_file() and not (path / "config.json").is_file():
        return f"{name} is no model yet: make it with python -m models.{path.name}."
    if path.exists():
        return None
    if name.startswith(("/", ".", "~")):
        return f"there is no {name} on this machine."
    parent = path.parent
    if parent != REPOSITORY and parent.is_dir():
        there = sorted(path.parent.name for path in parent.glob("*/config.json"))
        return f"there is no {name}; {parent} holds {', '.join(there)}."
    return None


def _shared_card_problem(application: ServeApplicationSchema, engine: EngineSettings) -> str | None:
    """The problem with several replicas on one GPU, whose engines start at once."""
    if (engine.model_extra or {}).get("kv_cache_memory_bytes"):
        return None
    for entry in application.deployments:
        options = entry.model_dump(exclude_unset=True).get("ray_actor_options") or {}
        share = options.get("num_gpus") or 0
        if entry.name == "Generator" and 0 < share < 1:
            return (
                f"deployments.Generator.ray_actor_options.num_gpus: {share:g} puts several engines on one GPU, and "
                "each would count what the others take as its own while it starts. Set "
                "args.engine.kv_cache_memory_bytes, the size of the cache of one replica."
            )
    return None


@dataclass(frozen=True, slots=True)
class _Demand:
    """Resources that one deployment asks for when it starts."""

    deployment: str
    replicas: int
    resources: Mapping[str, float]
    """Amounts for one replica, by Ray's names: CPU, GPU, memory in bytes, ..."""


def _demands_of(application: ServeApplicationSchema, settings: ServiceSettings | None) -> Iterator[_Demand]:
    entries = {entry.name: entry.model_dump(exclude_unset=True) for entry in application.deployments}
    defaults = {} if settings is None else settings.ray_actor_options()
    for name in {**defaults, **entries}:
        given = entries.get(name, {})
        options: Mapping[str, Any] = given.get("ray_actor_options") or defaults.get(name, {})
        # A whole core is Serve's own default.
        amounts = {"CPU": options.get("num_cpus", 1.0), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
        asked = given.get("placement_group_bundles") or [amounts | (options.get("resources") or {})]
        yield _Demand(name, _replicas_at_start(given), _sum_of(asked))


def _replicas_at_start(entry: Mapping[str, Any]) -> int:
    autoscaling = entry.get("autoscaling_config")
    if autoscaling:
        initial: int | None = autoscaling.get("initial_replicas")
        minimum: int = autoscaling.get("min_replicas", 1)
        return minimum if initial is None else initial
    replicas = entry.get("num_replicas")
    return replicas if isinstance(replicas, int) else 1


def _missing_resources(demands: Sequence[_Demand], machine: Mapping[str, float]) -> str | None:
    """A text that says what is asked for in vain, by which deployments, and what to change; None if all of it fits."""
    asked = _sum_of({name: amount * demand.replicas for name, amount in demand.resources.items()} for demand in demands)
    missing = [name for name, amount in asked.items() if amount > machine.get(name, 0) + _TOLERANCE]
    if not missing:
        return None
    totals = " and ".join(f"{asked[name]:g} {name} of {machine.get(name, 0):g}" for name in missing)
    lines = [f"The deployments ask for more than this machine has: {totals}."]
    for demand in demands:
        amounts = [f"{demand.resources[name]:g} {name}" for name in missing if demand.resources.get(name)]
        if amounts and demand.replicas:
            plural = "replica" if demand.replicas == 1 else "replicas"
            lines.append(f"  {demand.deployment}: {demand.replicas} {plural} with {' and '.join(amounts)} each")
    return "\n".join([*lines, _HINT])


def _sum_of(amounts: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for some in amounts:
        for name, amount in some.items():
            total[name] += amount or 0
    return total
