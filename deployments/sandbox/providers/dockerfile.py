"""The part of the Dockerfile language that sandboxes without images carry out: `COPY`, `WORKDIR`, `ENV`, `ARG`, `RUN`.

Without images there is no base image: the steps run over the programs of this machine. An instruction that would mean
something else here than in Docker is refused, by its name and line.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from deployments.sandbox.providers.files import file_at, files_below
from deployments.sandbox.providers.interface import SandboxFile, SandboxRefused

WITHOUT_EFFECT = {"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"}
"""Instructions that change nothing in which commands run."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")


@dataclass(frozen=True, slots=True)
class Copy:
    files: Mapping[str, SandboxFile]
    """By absolute path in the sandbox."""


@dataclass(frozen=True, slots=True)
class Run:
    argv: tuple[str, ...]
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


@dataclass(slots=True)
class _State:
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    froms: int = 0

    def expanded(self, text: str) -> str:
        known = self.arguments | self.environment
        return VARIABLE.sub(lambda found: known.get(found[1] or found[2]) or found[3] or "", text)

    def absolute(self, path: str) -> str:
        joined = PurePosixPath(self.workdir) / self.expanded(path)
        return str(joined) + ("/" if path.endswith("/") and str(joined) != "/" else "")


def build_plan(folder: Path) -> BuildPlan:
    """Reads `Dockerfile` in the folder, which is the context. Raises `SandboxRefused` with the instruction."""
    state, steps = _State(), list[Copy | Run]()
    for number, line in instructions(text_in(folder / "Dockerfile")):
        keyword, _, rest = line.partition(" ")
        where = f"line {number} of the Dockerfile, `{line}`,"
        try:
            step = _carried_out(keyword.upper(), rest.strip(), state, folder, where)
        except SandboxRefused:
            raise
        # Such as a quotation or a list that has no end.
        except ValueError as error:
            raise SandboxRefused(f"{where} cannot be read: {error}.") from error
        steps += [] if step is None else [step]
    if not state.froms:
        raise SandboxRefused(f"{folder / 'Dockerfile'} has no FROM instruction.")
    return BuildPlan(tuple(steps), dict(state.environment), state.workdir)


def text_in(path: Path, refusal: Callable[[str], Exception] = SandboxRefused) -> str:
    """The text of a file of a task. Raises what `refusal` makes if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise refusal(f"{path} cannot be read: {error}.") from error
    except UnicodeDecodeError as error:
        raise refusal(f"{path} is not UTF-8: {error}. Convert the file.") from error


def instructions(text: str) -> Iterator[tuple[int, str]]:
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


def _carried_out(keyword: str, rest: str, state: _State, folder: Path, where: str) -> Copy | Run | None:
    """Applies one instruction to the state; returns the step that it is, if it is one. Raises `SandboxRefused`."""
    match keyword:
        case "FROM":
            state.froms += 1
            if state.froms > 1:
                raise SandboxRefused(f"{where} begins a second stage, which sandboxes without images do not have.")
        case "WORKDIR":
            state.workdir = state.absolute(rest).rstrip("/") or "/"
            return Run(("/bin/mkdir", "-p", state.workdir), {}, "/", where)
        case "ENV":
            state.environment |= _assigned(state, rest, where)
        case "ARG":
            for word in shlex.split(rest):
                name, _, value = word.partition("=")
                state.arguments[name] = state.expanded(value)
        case "COPY" | "ADD":
            return Copy(copied(rest, state, folder, where))
        case "RUN":
            return Run(_argv_of(rest, where), {**state.arguments, **state.environment}, state.workdir, where)
        case _ if keyword not in WITHOUT_EFFECT:
            raise SandboxRefused(
                f"{where} is not carried out by sandboxes without images, which know FROM, WORKDIR, ENV, ARG, COPY, "
                "ADD and RUN. Use a provider that has images, such as docker."
            )
    return None


def _assigned(state: _State, rest: str, where: str) -> dict[str, str]:
    """The variables of `ENV`, in the form `name=value ...` or the older `name value`."""
    words = shlex.split(rest)
    if not words:
        raise SandboxRefused(f"{where} assigns nothing.")
    if "=" not in words[0]:
        name, _, value = rest.partition(" ")
        return {name: state.expanded(value.strip())}
    pairs = [word.partition("=") for word in words]
    return {name: state.expanded(value) for name, _, value in pairs}


def _argv_of(rest: str, where: str) -> tuple[str, ...]:
    """The command of `RUN`, in the form of a shell or of a JSON list."""
    if rest.startswith("--") or "<<" in rest:
        raise SandboxRefused(f"{where} has an option or a here-document, which sandboxes without images do not know.")
    if rest.startswith("["):
        try:
            return tuple(map(str, json.loads(rest)))
        except json.JSONDecodeError:
            pass  # A shell command that begins with a bracket, as Docker reads it.
    return ("/bin/sh", "-c", rest)


def copied(rest: str, state: _State, folder: Path, where: str) -> dict[str, SandboxFile]:
    """The files of `COPY` or `ADD`, by absolute path in the sandbox."""
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    executable: bool | None = None
    while words and words[0].startswith("--"):
        option, _, value = words.pop(0).partition("=")
        if option == "--chown" and value in ("root", "root:root", "0", "0:0"):
            continue
        if option != "--chmod" or not re.fullmatch("[0-7]{3,4}", value):
            raise SandboxRefused(f"{where} has the option {option}, which sandboxes without images do not know.")
        executable = bool(int(value, 8) & 0o100)
    if len(words) < 2:
        raise SandboxRefused(f"{where} needs a source and a destination.")
    *sources, given = [str(word) for word in words]
    target = state.absolute(given)
    found: dict[str, SandboxFile] = {}
    for source in map(state.expanded, sources):
        if "://" in source:
            raise SandboxRefused(
                f"{where} copies from {source!r}: sandboxes without images copy from the folder alone."
            )
        matches = sorted(folder.glob(source.lstrip("/"))) if source.strip("./") else [folder]
        if not matches:
            raise SandboxRefused(f"{where} copies {source!r}, which is not in {folder}.")
        for path in matches:
            if path.is_dir():
                found |= files_below(path, target)
            else:
                if not path.resolve().is_relative_to(folder.resolve()):
                    raise SandboxRefused(f"{where} copies {source!r}, which is not in {folder}.")
                into = given.endswith(("/", ".")) or len(sources) + len(matches) > 2 or target == state.workdir
                found[f"{target.rstrip('/')}/{path.name}" if into else target] = file_at(path)
    if executable is not None:
        found = {path: SandboxFile(file.content, executable) for path, file in found.items()}
    return found
