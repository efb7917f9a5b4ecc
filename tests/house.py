"""Figures of the house and its rules: how many modules there are, how long they are, and what none may do.

    python -m tests.house            # prints all figures; exits with 1 if one is beyond its bound or a rule is broken
    python -m tests.house --rules    # the rules alone, for `make lint`

Counted are the modules of `service/`, `deployments/` and `clients/` without `__init__.py` and the generated half of the
client. Cycles are import-linter's (`pyproject.toml`).
"""

import ast
import statistics
import subprocess
import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.paths import REPOSITORY

PRODUCT = ("service/", "deployments/", "clients/")
GENERATED = "clients/rollout_client/calls/sync_client/"
ENDURANCE = "tests/endurance/"
INTERFACES = (
    "clients/rollout_client/__init__.py",
    "clients/rollout_client/arrow/__init__.py",
    "clients/rollout_client/data_out/__init__.py",
    "clients/rollout_client/tensors/__init__.py",
    "clients/rollout_client/trainers/trl_async/__init__.py",
    "clients/rollout_client/weights/__init__.py",
    "clients/rollout_env/__init__.py",
    "deployments/sandbox/__init__.py",
)
"""Packages from which users import. Every other `__init__.py` has a docstring at most."""
SHORT, LONG = 60, 400
WEAK_OPENERS = ("What", "Of", "Args:")
"""A docstring begins with a noun phrase, or with a verb that says what the thing does."""

Sources = Mapping[str, str]
"""Python files by their path in the repository."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the tree, and its bound."""

    name: str
    value: float
    least: float = 0
    most: float = float("inf")

    @property
    def is_kept(self) -> bool:
        return self.least <= self.value <= self.most

    def __str__(self) -> str:
        bound = f"at least {self.least:g}" if self.least else f"at most {self.most:g}"
        return f"{self.name:<28}{self.value:>8g}   {bound}{'' if self.is_kept else '   BEYOND'}"


def figures(sources: Sources) -> list[Figure]:
    lines = {path: len(source.splitlines()) for path, source in sources.items()}
    modules = [count for path, count in lines.items() if is_module(path)]
    product = sum(count for path, count in lines.items() if path.startswith(PRODUCT) and not is_generated(path))
    tests = sum(count for path, count in lines.items() if path.startswith("tests/") and not path.startswith(ENDURANCE))
    return [
        Figure("modules", len(modules), most=420),
        Figure("median lines of a module", statistics.median(modules), least=120),
        Figure(f"modules below {SHORT} lines", sum(count < SHORT for count in modules), most=60),
        Figure(f"modules above {LONG} lines", sum(count > LONG for count in modules), most=0),
        Figure("product lines", product, most=58_500),
        Figure("test lines", tests, most=62_000),
    ]


def broken_rules(sources: Sources) -> list[str]:
    """A line for each place that breaks a rule."""
    product = {path: source for path, source in sources.items() if path.startswith(PRODUCT) and not is_generated(path)}
    trees = {path: ast.parse(source) for path, source in product.items()}
    return [
        *repeated_classes(trees),
        *(f"{path}:{problem}" for path, tree in trees.items() for problem in problems(path, tree)),
    ]


def repeated_classes(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    places = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, found in places.items():
        if len(found) > 1:
            yield f"{found[0]}: class {name} is also in {', '.join(found[1:])}: give one of them another name"


def problems(path: str, tree: ast.Module) -> Iterator[str]:
    """Re-exports and docstrings with weak openers, each as `line: sentence`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and path not in INTERFACES:
            for alias in node.names:
                if alias.asname == alias.name or path.endswith("__init__.py"):
                    yield f"{node.lineno}: {alias.name} is re-exported: import it from {node.module}"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            opener = " ".join(node.value.value.split(maxsplit=1)[:1])
            if opener in WEAK_OPENERS:
                yield f"{node.lineno}: a docstring begins with {opener!r}: begin with a noun or a verb"


def is_module(path: str) -> bool:
    return path.startswith(PRODUCT) and not path.endswith("__init__.py") and not is_generated(path)


def is_generated(path: str) -> bool:
    return path.startswith(GENERATED)


def tracked_sources(repository: Path) -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=repository, check=True, capture_output=True, text=True)
    paths = [path for path in listed.stdout.splitlines() if (repository / path).exists()]
    return {path: (repository / path).read_text(encoding="utf-8") for path in paths}


def main(arguments: list[str], write: Callable[[str], object] = sys.stdout.write) -> int:
    parser = ArgumentParser(prog="python -m tests.house", description="Figures of the house, and its rules.")
    parser.add_argument("--rules", action="store_true", help="check the rules alone")
    rules_alone = parser.parse_args(arguments).rules
    sources = tracked_sources(REPOSITORY)
    found = [] if rules_alone else figures(sources)
    broken = broken_rules(sources)
    for line in [*map(str, found), *broken]:
        write(f"{line}\n")
    return int(bool(broken) or not all(figure.is_kept for figure in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
