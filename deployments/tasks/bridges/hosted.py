"""An environment in a Python environment of its own, reached over HTTP. The other half is `rollout_env/serve.py`."""

import asyncio
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema_rs
from pydantic import BaseModel, ConfigDict, model_validator

import rollout_env
from rollout_env import (
    ChatMessage,
    OutcomeInvalid,
    SampleRejected,
    Session,
    StartOutcome,
    StepOutcome,
    TaskEnvironment,
    TemporaryFailure,
)
from rollout_env.loopback import is_loopback
from rollout_env.records import with_read_images

_REPOSITORY = Path(__file__).resolve().parents[3]
_ANSWER_TIMEOUT_S = 5.0
_STOP_S = 10.0
"""How long a host may take to end before it is killed."""
_PASSED_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")
"""Variables of the service that a host always gets, where they are set. The others may hold keys."""


class HostedEnvironmentError(Exception):
    """The exception that the environment raised in its own process. A note has its traceback."""


_RAISED: Mapping[str, type[Exception]] = {
    **{"rejected": SampleRejected, "invalid": OutcomeInvalid},
    **{"temporary": TemporaryFailure, "lost": TemporaryFailure},
}
"""The exceptions of an environment by the kinds of answers; all others are a `HostedEnvironmentError`."""


class HostNotStarted(Exception):
    """The process of the environment did not start to answer. The message says what it did."""


class _HostSettings(BaseModel):
    """A host to start: an interpreter that has the packages of the environment, starlette and uvicorn."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    python: str
    """Path of the interpreter."""
    import_path: str
    """`package.module:Class` of a `TaskEnvironment`, for that interpreter."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""
    folders: list[str] = []
    """Where the interpreter looks for modules first; the repository of the service is always among them."""
    variables: dict[str, str] = {}
    """Environment variables of the process."""
    passed_variables: list[str] = []
    """Names of variables of the service that the process gets too, beside `PATH`, `HOME`, `LANG` and `TMPDIR`."""


@dataclass(frozen=True, slots=True)
class _HostAddress:
    """Where a host is reached."""

    url: str
    socket: str | None = None
    """Path of its Unix socket; `None` if the URL is its address."""

    def client(self, timeout_s: float | None = None) -> httpx.Client:
        return httpx.Client(**self._options(httpx.HTTPTransport), timeout=timeout_s)

    def async_client(self) -> httpx.AsyncClient:
        """Without a time limit and without a bound of connections."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(**self._options(httpx.AsyncHTTPTransport), timeout=None, limits=limits)

    def _options(self, transport: Callable[..., Any]) -> dict[str, Any]:
        """Those of a client. Only a host on another machine is reached through the proxy of the environment."""
        if self.socket is not None:
            return {"base_url": self.url, "transport": transport(uds=self.socket), "trust_env": False}
        return {"base_url": self.url, "trust_env": not is_loopback(self.url)}


class HostedEnvironment(TaskEnvironment):
    """Every rollout has a session at the host. Fields, tools and limits are those of the hosted environment."""

    description = "An environment in a Python environment of its own."

    def __init__(
        self, host: _HostSettings | None = None, url: str | None = None, start_timeout_s: float = 120.0
    ) -> None:
        """Starts the host, if it is not reached by a URL.

        Args:
            host: what is started, and ended with this replica.
            url: of a host that runs already.
            start_timeout_s: how long it may take to answer for the first time.

        Raises:
            ValueError: neither or both of `host` and `url` are given.
            HostNotStarted: the host ended, or does not answer.
        """
        if (host is None) == (url is None):
            raise ValueError("give either host or url")
        self._process = None if host is None else _HostProcess(host, start_timeout_s)
        self._address = _HostAddress(url or "") if self._process is None else self._process.address
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        with self._address.client(start_timeout_s) as client:
            described = client.get("/description").raise_for_status().json()
        self.description = described["description"]  # type: ignore[misc]
        self.ExtraEnvInfo = _fields_model(described["fields"])  # type: ignore[misc]
        limits = ("lost_session", "max_sessions", "session_idle_s", "max_concurrent_steps", "sample_count")
        for attribute in ("tools", *limits):
            setattr(self, attribute, described.get(attribute))
        if described.get("forks_sessions"):
            self.fork_session = partial(self.open_session, forks=True)  # type: ignore[method-assign]

    async def start(self, message_log: list[ChatMessage], extra_env_info: BaseModel) -> StartOutcome:
        """Starts the sample in the hosted environment; adds nothing if that has no start."""
        await self._host_runs()
        begun = await self.request("/start", message_log=message_log, extra_env_info=extra_env_info.model_dump())
        if begun is None:
            return StartOutcome()
        begun = with_read_images(begun)
        return StartOutcome(begun["observation"] or None, begun["metadata"], begun["next_stop_strings"])

    async def open_session(
        self,
        message_log: list[ChatMessage],  # noqa: ARG002 - the host gets them with the first step
        extra_env_info: Any,  # noqa: ARG002
        forks: bool = False,
    ) -> Session:
        await self._host_runs()
        return _HostedSession(self, (await self.request("/sessions", forks=forks))["session_id"])

    def example_samples(self, count: int, seed: int) -> list[dict[str, Any]]:
        if self._process is not None:
            self._process.ensure()
        with self._address.client() as client:
            samples: list[dict[str, Any]] = _result_of(client.post("/examples", json={"count": count, "seed": seed}))
        return samples

    async def request(self, path: str, method: Literal["POST", "DELETE"] = "POST", **body: Any) -> Any:
        """Raises what the hosted environment raised; `TemporaryFailure` if the host does not answer."""
        try:
            response = await self._client_of_this_loop().request(method, path, json=body)
        except httpx.TransportError as error:
            raise TemporaryFailure(f"The host of the environment does not answer: {error!r}") from error
        return _result_of(response)

    async def close(self) -> None:
        """Ends the host that was started."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    async def _host_runs(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.ensure)

    def _client_of_this_loop(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client = self._address.async_client()
            self._loop = loop
        return self._client


class _HostedSession(Session):
    def __init__(self, environment: HostedEnvironment, session_id: str) -> None:
        self._environment = environment
        self._session_id = session_id

    async def step(self, message_log: list[ChatMessage], extra_env_info: BaseModel) -> StepOutcome:
        """Raises what the hosted environment raised; `TemporaryFailure` if the host or the session is gone."""
        state = extra_env_info.model_dump()
        outcome = await self._environment.request(
            "/step", session_id=self._session_id, message_log=message_log, extra_env_info=state
        )
        return StepOutcome(**with_read_images(outcome))

    async def close(self) -> None:
        await self._environment.request(f"/sessions/{self._session_id}", "DELETE")


class _HostProcess:
    """The process of a host, which is started anew when it has ended. It ends with this process, however that ends."""

    def __init__(self, settings: _HostSettings, start_timeout_s: float) -> None:
        """Returns when it answers. Raises `HostNotStarted`."""
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        # In a replica that is its own folder, which somebody removes when the replica was killed.
        self._folder = tempfile.TemporaryDirectory(prefix="host-", dir=get_temp_dir())
        self._socket = str(Path(self._folder.name) / "socket")
        self.address = _HostAddress("http://host", self._socket)
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        """Held while the process is started: many rollouts notice its end at once, and one restarts it."""
        self.ensure()

    def ensure(self) -> None:
        """Starts it if it does not run. Raises `HostNotStarted`."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def _start(self) -> None:
        Path(self._socket).unlink(missing_ok=True)
        settings = self._settings
        folders = [*settings.folders, str(_REPOSITORY), str(Path(rollout_env.__file__).parents[1])]
        command = [settings.python, "-m", "rollout_env", "serve", settings.import_path]
        options = ["--arguments", json.dumps(settings.arguments), "--socket", self._socket, "--until-input-ends"]
        variables = {**_variables_of(settings, os.environ), "PYTHONPATH": os.pathsep.join(folders)}
        try:
            self._process = subprocess.Popen([*command, *options], stdin=subprocess.PIPE, env=variables)
        except OSError as error:
            raise HostNotStarted(f"{settings.python} cannot be started: {error}") from error
        self._wait_until_it_answers(self._process)

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        host, gives_up_at = f"The host of {self._settings.import_path}", time.monotonic() + self._start_timeout_s
        with self.address.client(_ANSWER_TIMEOUT_S) as client:
            while time.monotonic() < gives_up_at:
                if process.poll() is not None:
                    raise HostNotStarted(f"{host} ended with exit code {process.returncode}; what it wrote is above.")
                with suppress(httpx.TransportError):
                    client.get("/description")
                    return
                time.sleep(0.05)
        self._end()
        raise HostNotStarted(f"{host} did not answer within {self._start_timeout_s:g} s.")

    def stop(self) -> None:
        """Ends the process for good."""
        with self._starting:
            self._end()
            self._folder.cleanup()

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _variables_of(settings: _HostSettings, own: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a host: those that the settings name or set, and a few that every process needs."""
    passed = {name: own[name] for name in (*_PASSED_VARIABLES, *settings.passed_variables) if name in own}
    return {**passed, **settings.variables}


def _result_of(response: httpx.Response) -> Any:
    """The answer as JSON. Raises what the hosted environment raised."""
    if response.status_code == 409:
        problem = response.json()
        raised: Exception = _RAISED.get(problem["kind"], HostedEnvironmentError)(problem["message"])
        if "traceback" in problem:
            raised.add_note(problem["traceback"])
        raise raised
    response.raise_for_status()
    return response.json() if response.content else None


def _fields_model(schema: dict[str, Any]) -> type[BaseModel]:
    """A model that accepts what the JSON schema does, keeps it as it is, and has this schema."""
    validator = jsonschema_rs.validator_for(schema)

    class HostedFields(BaseModel):
        model_config = ConfigDict(extra="allow")

        @model_validator(mode="before")
        @classmethod
        def check(cls, fields: Any) -> Any:
            if (error := next(validator.iter_errors(fields), None)) is not None:
                raise ValueError(": ".join(filter(None, (".".join(map(str, error.instance_path)), error.message))))
            return fields

        @classmethod
        def model_json_schema(cls, *_args: Any, **_options: Any) -> dict[str, Any]:
            return schema

    return HostedFields
