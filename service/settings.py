"""The argument of the app builder: what runs, who may use it, and where traces go.

The number of replicas is in `deployments` of the Serve config.
"""

from typing import Any, Self

from pydantic import Field, model_validator

from deployments.agents.settings import AgentSettings, agent_deployment
from deployments.data.settings import DataSettings
from deployments.generation.settings import EngineSettings, ResponseSettings
from deployments.images.book import ImagesSettings
from deployments.jobs.registry import JobsSettings
from deployments.models.settings import ChatModelSettings, RewardModelSettings, UserSimulatorSettings
from deployments.policy.settings import PolicySettings
from deployments.rollout_records.book import RolloutRecordsSettings
from deployments.sessions.session_table import SessionsSettings
from deployments.strict_settings import StrictSettings


class AccessSettings(StrictSettings):
    """Who may use the service."""

    keys_file: str | None = None
    """A YAML or JSON file of the keys that requests must carry, on each node that runs an ingress replica; a relative
    path is relative to the config, or with `serve run` to the repository. A change of it takes effect within two
    seconds. Without it the service asks for no key, and starts on loopback alone."""
    guarded_by: str | None = Field(default=None, min_length=4)
    """Description of what stands in front of the service and lets only known callers through. With it the service may
    listen on other addresses than loopback although it asks for no key."""


class TracingSettings(StrictSettings):
    """Traces of requests, by OpenTelemetry."""

    endpoint: str = Field(pattern=r"^https?://")
    """Where a collector takes traces by OTLP over HTTP, such as `http://collector:4318/v1/traces`. The environment
    variable `OTEL_EXPORTER_OTLP_HEADERS` has the headers."""
    sample_rate: float = Field(default=1.0, ge=0, le=1)
    """The share of requests that are traced, among those whose `traceparent` does not say it."""
    rollouts_per_request: int | None = Field(default=8, ge=1)
    """How many rollouts of a traced request have spans, those that begin first. Null for all: with their turns,
    generations and steps they take 0.1 ms of processor time a span."""


MIB = 2**20
GAME_TASK = "deployments.agents.game_program:GameTask"
PLAIN_AGENT_TASK = "deployments.agents.environment:PlainAgentTask"
HARBOR_TASKS = "deployments.harbor.tasks:HarborTasks"
SERVICE_DEPLOYMENTS = ("Ingress", "Generator", "Policy", "Data", "Jobs", "Sessions", "Images", "Records")
"""The deployments that a service has, `Data` if a task has data, `Jobs` unless the config has `jobs: null`, `Sessions`,
`Images` and `Records` if it has `sessions`, `images` and `rollout_records`; each task has one more, named after it, and
with an agent another one, `{task}_agent`."""


class EnvironmentSettings(StrictSettings):
    """One task."""

    import_path: str = ""
    """`package.module:Class` of a `TaskEnvironment`. It may be missing only where an `agent` scores the task."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    agent: AgentSettings | None = None
    """The program that plays the rollouts of the task; by default the service plays them, turn by turn."""
    data: DataSettings | None = None
    """Where the task's samples come from; without it the environment makes them."""
    models: dict[str, ChatModelSettings] = Field(default_factory=dict)
    """Models that the environment may ask, by the names that it uses for them: behind OpenAI-compatible servers, or
    policies of this service."""
    user_simulator: UserSimulatorSettings | None = None
    """A user who talks back, for an environment that has one; by default a scripted one, where it has that."""
    reward_models: list[str] = Field(default_factory=list)
    """Those of the service's `reward_models` that the environment may ask."""
    certificate: str | None = None
    """The file of its certificate by `rollout env certify`, whose hash `/tasks` and results show. It must have no
    failed check and be of the environment as it is; otherwise the environment does not start."""

    @property
    def all_models(self) -> dict[str, ChatModelSettings]:
        """The models that the task may ask, by their fields."""
        models = {f"models.{name}": model for name, model in self.models.items()}
        if self.agent is not None and (game := self.agent.game) is not None:
            models |= {f"agent.game.models.{name}": model for name, model in game.models.items()}
            if "rivals" in game.model_fields_set:
                models["agent.game.rivals"] = game.rivals
        return models

    @model_validator(mode="after")
    def has_the_model_of_its_user(self) -> Self:
        if self.user_simulator is not None and self.user_simulator.model not in self.models:
            raise ValueError(f"user_simulator.model: there is no {self.user_simulator.model} under models")
        if self.user_simulator is not None and self.agent is not None:
            raise ValueError("user_simulator talks to the policy, and here an agent plays: leave one of them out")
        return self

    @model_validator(mode="after")
    def has_an_environment(self) -> Self:
        if self.agent is not None and self.agent.harbor is not None and self.import_path not in ("", HARBOR_TASKS):
            raise ValueError("import_path: the verifier of a Harbor task judges it: leave it out beside agent.harbor")
        if self.agent is not None and self.agent.game is not None:
            if self.import_path not in ("", GAME_TASK):
                raise ValueError("import_path has no meaning beside agent.game, which brings its task: leave it out")
            self.import_path, self.arguments = GAME_TASK, {"settings": self.agent.game}
        if self.import_path:
            return self
        if self.agent is None or self.agent.scored_by != "agent":
            raise ValueError("import_path is missing: name the class that judges the task, as package.module:Class")
        self.import_path = PLAIN_AGENT_TASK
        if self.agent.harbor is not None:
            self.import_path, self.arguments = HARBOR_TASKS, {"settings": self.agent.harbor.model_dump()}
        return self


class RequestLimits(StrictSettings):
    """Limits of one request, and the timeout of its steps."""

    max_body_bytes: int = Field(default=256 * MIB, ge=1)
    """A larger `POST /rollout` body is refused."""
    max_rollouts_per_request: int = Field(default=65_536, ge=1)
    """Samples times `num_generations`."""
    max_sample_bytes: int = Field(default=16 * MIB, ge=1)
    """Bytes of one pickled sample with all its fields. Checked in bodies over 64 KiB. Encoding the result of
    one rollout takes time in proportion to it."""
    max_echoed_bytes_per_request: int = Field(default=1024 * MIB, ge=1)
    """Bytes of the body times `num_generations`: each result repeats the fields of its sample, and the ingress replica
    holds a whole answer until it is sent."""
    step_timeout_s: float | None = Field(default=120, gt=0)
    """Seconds after which an environment's step is cancelled and tried again; null for no limit. They begin when the
    environment is called: a step that waits in the replica's queue uses none of them."""


class AdmissionSettings(StrictSettings):
    """Bounds of what is in flight in one ingress replica, and so of its memory.

    A `POST /rollout` beyond them gets 429 with `Retry-After`, and the client waits. A request is in flight until its
    response has been sent.
    """

    max_rollouts: int = Field(default=131_072, ge=1)
    """Samples times `num_generations`, of all requests together. The default is 5 GB at 40 KB a rollout: twice the
    largest request that `limits` allows by default."""
    max_tokens: int = Field(default=2**31, ge=1)
    """Tokens that the rollouts may hold at their ends: for each rollout its `max_seq_len` (by default the model's), or
    `max_rollout_turns` times `max_new_tokens` where that is less. The default is 26 GB at 12 bytes a token, if all
    rollouts reach their bound: 65,536 rollouts of 32,768 tokens."""
    max_body_bytes: int = Field(default=512 * MIB, ge=1)
    """Decompressed bytes of request bodies, which take several times as much when they are parsed. The default is twice
    the largest body that `limits` allows by default."""


class _Scheduling(StrictSettings):
    """How generations are given to the generator replicas."""

    window_factor: float | None = Field(default=2.0, ge=1)
    """How many generations one replica may have at once, in multiples of its engine's `max_num_seqs`; further ones wait
    in the ingress, in turn from all requests. With null each generation is sent at once and waits in the engine: then
    one large request delays all others, which is of use for comparison only."""
    idle_program_s: float | None = Field(default=20, gt=0)
    """How long a rollout of several turns that waits for its tool keeps its place in a KV cache, in seconds, while
    others need the place; one that has lost it waits for another when it comes back. With null no rollout keeps a
    place: each that comes back takes the place of those that wait for their tools."""


class TrainersSettings(StrictSettings):
    """vLLM's control routes for reinforcement learning, for trainers that bring their own client of a vLLM server."""

    pause_s: float = Field(default=20, gt=0)
    """The longest pause of the engines, in seconds: then generations go on, whoever has paused them. The generations
    for which a pause with `mode=wait` waits have to end within it."""


class ServiceSettings(StrictSettings):
    """Everything about a service except how many replicas run."""

    engine: EngineSettings
    """Which model generates, and on which hardware."""
    environments: dict[str, EnvironmentSettings] = Field(min_length=1)
    """By `task_name`."""
    reward_models: dict[str, RewardModelSettings] = Field(default_factory=dict)
    """Sequence-classification models, each in a deployment of its own, by its name."""
    responses: ResponseSettings = ResponseSettings()
    """Parts of responses that environments and answers show beside the text: tool calls and reasoning."""
    access: AccessSettings = AccessSettings()
    """Who may use the service."""
    limits: RequestLimits = RequestLimits()
    """Limits of one request."""
    admission: AdmissionSettings = AdmissionSettings()
    """Bounds of all requests of one ingress replica together."""
    scheduling: _Scheduling = _Scheduling()
    """How requests share the generator replicas."""
    policy: PolicySettings = PolicySettings()
    """Where versions of the weights are kept, and how they reach the replicas."""
    jobs: JobsSettings | None = JobsSettings()
    """Where jobs and requests with an `Idempotency-Key` are kept; by default in SQLite in a temporary folder. A cluster
    of several nodes needs `redis_url`. With null the service keeps none and refuses both with 501."""
    metrics: bool = True
    """Whether the replicas record metrics of rollouts and engines, for Ray's exporters and `GET /metrics`."""
    tracing: TracingSettings | None = None
    """Where traces of requests go; by default nowhere."""
    sessions: SessionsSettings | None = None
    """Where records of agents' sessions are kept, and how many; `{}` for the defaults. A cluster of several nodes needs
    `redis_url`. With null, the default, there are no sessions."""
    images: ImagesSettings | None = None
    """Where images of prompts and observations are kept, and which are taken; `{}` for the defaults. A cluster of
    several nodes needs `redis_url`. With null, the default, the service takes no images."""

    rollout_records: RolloutRecordsSettings | None = None
    """How long records of rollouts that have ended are kept, for `GET /rollouts/{rollout_id}` and what compares with
    them; `{}` for the defaults. With null, the default, there are none."""
    trainers: TrainersSettings | None = None
    """Whether trainers may drive the service as one vLLM server; `{}` for the defaults. They change the weights and
    pause generations: a key needs the scope `policy`. With null, the default, there are no such routes."""

    @model_validator(mode="after")
    def refuse_transfers_without_routes(self) -> Self:
        if self.policy.transfer.trainers and self.trainers is None:
            raise ValueError("policy.transfer.trainers send weights by the routes of trainers: add `trainers: {}`")
        return self

    @model_validator(mode="after")
    def refuse_another_cache_of_images(self) -> Self:
        if self.images is not None and (self.engine.model_extra or {}).get("mm_processor_cache_gb"):
            raise ValueError(
                "engine.mm_processor_cache_gb has no meaning beside images, which are kept once: leave it out"
            )
        return self

    @model_validator(mode="after")
    def refuse_agents_without_sessions(self) -> Self:
        if self.sessions is None and (tasks := ", ".join(self.agents_by_task)):
            raise ValueError(f"environments.{tasks}.agent is played in sessions: add `sessions: {{}}`")
        return self

    @model_validator(mode="after")
    def refuse_taken_names(self) -> Self:
        taken = {*SERVICE_DEPLOYMENTS}
        for field, names in (("environments", self.environments), ("reward_models", self.reward_models)):
            if clash := [name for name in names if name in taken]:
                raise ValueError(f"{field}: {', '.join(clash)} is the name of another deployment; choose another one")
            taken |= names.keys()
        if clash := [name for name in map(agent_deployment, self.agents_by_task) if name in taken]:
            raise ValueError(f"environments: {', '.join(clash)} is the deployment of an agent; choose another name")
        return self

    @model_validator(mode="after")
    def refuse_models_that_cannot_be_asked(self) -> Self:
        for task_name, environment in self.environments.items():
            field = f"environments.{task_name}"
            for name, model in environment.all_models.items():
                if model.base_url is None and self.access.keys_file is not None and model.api_key_variable is None:
                    raise ValueError(f"{field}.{name}.api_key_variable is missing: this service asks for keys")
            if unknown := ", ".join(name for name in environment.reward_models if name not in self.reward_models):
                raise ValueError(f"{field}.reward_models: there is no {unknown} under reward_models")
        return self

    def ray_actor_options(self) -> dict[str, dict[str, float]]:
        """Resources that Ray reserves for a replica of each deployment, by name, unless the config says otherwise.

        Without it Ray would reserve a whole core for each. A reservation only decides how many replicas fit on a
        machine: a replica may use more.
        """
        has = {
            "Data": self.data_by_task,
            "Jobs": self.jobs is not None,
            "Sessions": self.sessions is not None,
            "Images": self.images is not None,
            "Records": self.rollout_records is not None,
        }
        small = [*self.environments, *map(agent_deployment, self.agents_by_task), *(name for name in has if has[name])]
        return {
            "Ingress": {"num_cpus": 0.2},
            "Generator": self.engine.ray_actor_options(),
            "Policy": {"num_cpus": 0.1},
            **{name: {"num_cpus": 0.1} for name in small},
            **{name: model.ray_actor_options() for name, model in self.reward_models.items()},
        }

    @property
    def agents_by_task(self) -> dict[str, AgentSettings]:
        """The agents of the tasks that have one."""
        return {task_name: task.agent for task_name, task in self.environments.items() if task.agent is not None}

    @property
    def data_by_task(self) -> dict[str, DataSettings]:
        """The data of the tasks that have some."""
        return {task_name: task.data for task_name, task in self.environments.items() if task.data is not None}
