"""The part of the Dockerfile language that sandboxes without images carry out: what most tasks are written with.

Without images there is no base image: the steps run over the programs of this machine. Any other instruction, and each
option, is refused by its line.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from deployments.sandbox.providers.interface import SandboxFile, SandboxRefused, files_below

_WITHOUT_EFFECT = {"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"}
"""Instructions that change nothing in which commands run."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")


@dataclass(frozen=True, slots=True)
class Copy:
    files: Mapping[str, SandboxFile]
    """By absolute path in the sandbox."""


@dataclass(frozen=True, slots=True)
class Run:
    command: str
    """A line of shell."""
    environment: Mapping[str, str]
    workdir: str
    line: str
    """The instruction as it is written, for messages."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The steps, in order, and what commands of the image begin with."""

    steps: tuple[Copy | Run, ...]
    environment: Mapping[str, str]
    workdir: str


def build_plan(folder: Path) -> BuildPlan:
    """Reads `Dockerfile` in the folder, which is the context. Raises `SandboxRefused` with the instruction."""
    environment, arguments, steps = dict[str, str](), dict[str, str](), list[Copy | Run]()
    workdir, has_base = PurePosixPath("/"), False

    def expanded(text: str) -> str:
        known = arguments | environment
        return VARIABLE.sub(lambda found: known.get(found[1] or found[2]) or found[3] or "", text)

    for number, line in _instructions(text_in(folder / "Dockerfile")):
        keyword, _, rest = line.partition(" ")
        where = f"line {number} of the Dockerfile, `{line}`,"
        try:
            match keyword.upper():
                case "FROM" if not has_base:
                    has_base = True
                case "WORKDIR":
                    workdir /= expanded(rest)
                    steps.append(Run(shlex.join(["/bin/mkdir", "-p", str(workdir)]), {}, "/", where))
                case "ENV" | "ARG" as kind:
                    words = [word.partition("=") for word in shlex.split(rest)]
                    if kind == "ENV" and not all(is_assigned for _, is_assigned, _ in words):
                        raise SandboxRefused(f"{where} is not of the form `ENV name=value`.")
                    # As in Docker, each value sees the variables as they were before the instruction.
                    variables = environment if kind == "ENV" else arguments
                    variables |= {name: expanded(value) for name, _, value in words}
                case "COPY" | "ADD" if not rest.startswith(("--", "[")) and "://" not in rest:
                    steps.append(Copy(_copied(list(map(expanded, rest.split())), folder, workdir, where)))
                case "RUN" if not re.match(r'--|\[\s*".*"\s*\]$', rest) and "<<" not in rest:
                    steps.append(Run(rest, arguments | environment, str(workdir), where))
                case other if other not in _WITHOUT_EFFECT:
                    raise SandboxRefused(
                        f"{where} is not carried out by sandboxes without images, which know one FROM, WORKDIR, ENV "
                        "and ARG, RUN with a line of shell, and COPY and ADD of files beside the Dockerfile, without "
                        "options. Use a provider that has images, such as docker."
                    )
        except ValueError as error:
            if isinstance(error, SandboxRefused):
                raise
            # Such as a quotation that has no end.
            raise SandboxRefused(f"{where} cannot be read: {error}.") from error
    if not has_base:
        raise SandboxRefused(f"{folder / 'Dockerfile'} has no FROM instruction.")
    return BuildPlan(tuple(steps), environment, str(workdir))


def text_in(path: Path, refusal: Callable[[str], Exception] = SandboxRefused) -> str:
    """The text of a file of a task. Raises what `refusal` makes if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise refusal(f"{path} cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise refusal(f"{path} is not UTF-8: {error}. Convert the file.") from error


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """The instructions with the number of their first line; comments are dropped, continued lines joined."""
    begun, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or parts):
            continue
        begun = begun or number
        if (stripped := line.rstrip()).endswith("\\"):
            parts.append(stripped[:-1].strip())
            continue
        yield begun, " ".join([*parts, stripped.strip()]).strip()
        begun, parts = 0, []
    if parts:
        yield begun, " ".join(parts)


def _copied(words: list[str], folder: Path, workdir: PurePosixPath, where: str) -> dict[str, SandboxFile]:
    """The files of `COPY` or `ADD`, by absolute path in the sandbox."""
    if len(words) < 2:
        raise SandboxRefused(f"{where} needs a source and a destination.")
    *sources, given = words
    target = workdir / given
    found: dict[str, SandboxFile] = {}
    for source in sources:
        matches = sorted(folder.glob(source.lstrip("/"))) if source.strip("./") else [folder]
        if not matches or not all(path.resolve().is_relative_to(folder.resolve()) for path in matches):
            raise SandboxRefused(f"{where} copies {source!r}, which is not in {folder}.")
        for path in matches:
            into = given.endswith(("/", ".")) or len(sources) + len(matches) > 2 or target == workdir
            if path.is_dir():
                found |= files_below(path, str(target))
            else:
                found[str(target / path.name if into else target)] = SandboxFile.at(path)
    return found
