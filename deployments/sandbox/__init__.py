"""Runs programs that nobody trusts. Knows neither Ray nor vLLM nor environments.

All but `remote` and `server` needs the standard library alone.
"""

from deployments.sandbox.interface import Limits, Outcome, Program, ProgramRefused, Sandbox, SandboxLost
from deployments.sandbox.local import LocalSandbox
from deployments.sandbox.walls import WALLS, SandboxTooWeak, Wall, WallName, WallReport

__all__ = [
    "WALLS",
    "Limits",
    "LocalSandbox",
    "Outcome",
    "Program",
    "ProgramRefused",
    "Sandbox",
    "SandboxLost",
    "SandboxTooWeak",
    "Wall",
    "WallName",
    "WallReport",
]
