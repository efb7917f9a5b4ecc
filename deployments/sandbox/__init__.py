"""Runs untrusted programs, by the standard library alone. Knows neither Ray nor vLLM nor environments."""

from deployments.sandbox.interface import (
    WALLS,
    Limits,
    Outcome,
    Program,
    Sandbox,
    SandboxLost,
    SandboxTooWeak,
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
    "Sandbox",
    "SandboxLost",
    "SandboxTooWeak",
    "WallName",
    "WallReport",
]
