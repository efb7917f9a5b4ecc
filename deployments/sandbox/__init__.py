"""Runs untrusted programs. Knows neither Ray nor vLLM nor environments.

All but `remote` and `server` need only the standard library.
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
