"""The fields of vLLM's engine arguments, read from its source: importing vLLM takes seconds."""

import ast
from importlib.util import find_spec
from pathlib import Path

ENGINE_ARGS_CLASSES = {"EngineArgs", "AsyncEngineArgs"}


def engine_fields() -> frozenset[str] | None:
    """The names of all fields of `AsyncEngineArgs`; None if vLLM is not installed."""
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return None
    source = Path(vllm.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return frozenset(
        statement.target.id
        for definition in classes
        if definition.name in ENGINE_ARGS_CLASSES
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
