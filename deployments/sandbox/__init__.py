"""Runs programs that nobody trusts. Knows neither Ray nor vLLM nor environments.

All but `remote` and `server` needs the standard library alone.
"""

from deployments.sandbox.interface import (
    WALLS,
    Limits,
    Outcome,
    Program,
    ProgramRefused,
    Sandbox,
    SandboxLost,
    SandboxTooWeak,
    Wall,
    WallName,
    WallReport,
)
from deployments.sandbox.local import LocalSandbox

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
