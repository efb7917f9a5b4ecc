"""The settings of a sandbox among the arguments of an environment."""

import os
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.environments.assigned_cores import assigned_cores
from deployments.sandbox import Limits, LocalSandbox, Sandbox, WallName
from deployments.sandbox.interface import MIB
from deployments.sandbox.remote import TOKEN_VARIABLE, RemoteSandbox

RUNS_PER_CORE = 2
"""One is started and ended by the kernel while the other one computes."""


class SandboxSettings(BaseModel):
    """Which sandbox runs programs, and what a run may use."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: str | None = None
    """Of a server that runs the programs (`deployments/sandbox/server.py`), in place of the machine of the replica. The
    server decides about its isolation. Its token is in the environment variable `ROLLOUT_SANDBOX_TOKEN`."""
    isolation: Literal["auto", "bubblewrap", "namespaces", "limits"] = "auto"
    """`auto` takes the strongest one that works on the machine of the replica."""
    require: Literal["all"] | tuple[WallName, ...] = ()
    """Walls without which the environment does not start."""
    packages: tuple[str, ...] = ()
    """Folders that programs may import from, beside the standard library."""
    max_concurrent_runs: Annotated[int, Field(ge=1)] | None = None
    """Without it two for each of the `num_cpus` that Ray reserves for the replica."""
    time_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """Of wall time for one run, in seconds."""
    processor_time_limit_s: Annotated[float, Field(gt=0)] = 5.0
    """Of all processes of one run together, in seconds."""
    memory_limit_mib: Annotated[int, Field(ge=32)] = 512
    """Of all processes of one run together, and of the address space of each."""
    max_processes: Annotated[int, Field(ge=1)] = 32
    """Processes and threads of one run."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.url is not None and (self.require or self.packages or self.isolation != "auto"):
            raise ValueError("isolation, require and packages are settings of the server when there is a url")
        return self

    @property
    def limits(self) -> Limits:
        return Limits(
            time_s=self.time_limit_s,
            processor_time_s=self.processor_time_limit_s,
            memory_bytes=self.memory_limit_mib * MIB,
            processes=self.max_processes,
        )

    def concurrent_runs(self) -> int:
        """How many programs a replica runs at once."""
        return self.max_concurrent_runs or RUNS_PER_CORE * assigned_cores()

    def start(self) -> Sandbox:
        """Starts the sandbox, which takes about a second.

        Raises:
            SandboxTooWeak: a required wall does not stand on this machine.
            SandboxLost: no program can be run.
        """
        if self.url is not None:
            return RemoteSandbox(self.url, os.environ.get(TOKEN_VARIABLE, ""))
        return LocalSandbox(self.concurrent_runs(), self.isolation, self.require, self.packages)
