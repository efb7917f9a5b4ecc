"""Figures of the house and its rules: how large its rooms are, and what none of their modules may do.

    python -m tests.house    # prints all figures; exits with 1 if one is beyond its bound or a rule is broken

A code line holds a token that is neither of a comment, a docstring nor an import. Public names are the classes and
functions of modules without a leading underscore. Modules are counted without `__init__.py`, and nothing is of the
generated half of the client. Bounds are only lowered. Cycles are import-linter's (`pyproject.toml`).
"""

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.paths import REPOSITORY

SERVER = ("service/", "deployments/")
PRODUCT = (*SERVER, "clients/")
GENERATED = "clients/rollout_client/calls/sync_client/"
INTERFACES = (
    "clients/rollout_client/__init__.py",
    "clients/rollout_client/arrow/__init__.py",
    "clients/rollout_client/data_out/__init__.py",
    "clients/rollout_client/tensors/__init__.py",
    "clients/rollout_client/weights/__init__.py",
    "clients/rollout_env/__init__.py",
    "deployments/sandbox/__init__.py",
)
"""Packages from which users import. Every other `__init__.py` has a docstring at most."""
SHORT, LONG = 60, 400
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
WEAK_OPENERS = ("What", "Of", "Args:")
"""A docstring begins with a noun phrase, or with a verb that says what the thing does."""
POSSESSIVE_GROUP = re.compile(r"(?:(?<!\\)\)|\A)(?:[*+?]|\{[\d,]*\})\+")
"""In one literal or at the begin of one. Before 3.11.5 Python matches it wrongly where the group may fail after it has
read something; an atomic group, `(?>(?:...)*)`, is right."""

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
    code = {path: code_lines(source) for path, source in sources.items() if not is_generated(path)}

    def code_of(*rooms: str) -> int:
        return sum(count for path, count in code.items() if path.startswith(rooms))

    server = {path: source for path, source in sources.items() if path.startswith(SERVER)}
    product = {path: source for path, source in sources.items() if path.startswith(PRODUCT) and not is_generated(path)}
    modules = [len(source.splitlines()) for path, source in server.items() if not path.endswith("__init__.py")]
    return [
        Figure("code lines of the server", code_of(*SERVER), most=29_577),
        Figure("of them in tasks", code_of("deployments/tasks/"), most=4_500),
        Figure("code lines of the clients", code_of("clients/"), most=8_941),
        Figure("of both", code_of(*SERVER, "clients/"), most=38_518),
        Figure("code lines of the tests", code_of("tests/"), most=50_000),
        Figure("of what is around them", code_of("benchmarks/", "examples/", "models/"), most=4_500),
        Figure("public names of the product", sum(map(public_names, product.values())), most=1_900),
        Figure("public names of the server", sum(map(public_names, server.values())), most=1_051),
        Figure("modules of the server", len(modules), most=271),
        Figure("median lines of a module", statistics.median(modules), least=110, most=220),
        Figure(f"modules below {SHORT} lines", sum(count < SHORT for count in modules), most=10),
        Figure(f"modules above {LONG} lines", sum(count > LONG for count in modules), most=0),
    ]


def code_lines(source: str) -> int:
    silent, lines = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            silent.update(range(node.lineno, (node.end_lineno or 0) + 1))
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and is_text(statement.value):
                silent.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - silent)


def is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def public_names(source: str) -> int:
    named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(isinstance(node, named) and not node.name.startswith("_") for node in ast.parse(source).body)


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
    """Re-exports, docstrings with weak openers and patterns that some Pythons match wrongly, as `line: sentence`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and path not in INTERFACES:
            for alias in node.names:
                if alias.asname == alias.name or path.endswith("__init__.py"):
                    yield f"{node.lineno}: {alias.name} is re-exported: import it from {node.module}"
        elif isinstance(node, ast.Expr) and is_text(node.value):
            opener = " ".join(ast.literal_eval(node.value).split(maxsplit=1)[:1])
            if opener in WEAK_OPENERS:
                yield f"{node.lineno}: a docstring begins with {opener!r}: begin with a noun or a verb"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and POSSESSIVE_GROUP.search(node.value):
            yield f"{node.lineno}: a group is repeated possessively: write an atomic group, (?>(?:...)*)"


def is_generated(path: str) -> bool:
    return path.startswith(GENERATED)


def tracked_sources(repository: Path) -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=repository, check=True, capture_output=True, text=True)
    paths = [path for path in listed.stdout.splitlines() if (repository / path).exists()]
    return {path: (repository / path).read_text(encoding="utf-8") for path in paths}


def main(write: Callable[[str], object] = sys.stdout.write) -> int:
    sources = tracked_sources(REPOSITORY)
    found, broken = figures(sources), broken_rules(sources)
    for line in [*map(str, found), *broken]:
        write(f"{line}\n")
    return int(bool(broken) or not all(figure.is_kept for figure in found))


if __name__ == "__main__":
    sys.exit(main())
