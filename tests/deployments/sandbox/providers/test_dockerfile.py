"""The part of the Dockerfile language that sandboxes without images carry out."""

from pathlib import Path

import pytest

from deployments.sandbox.providers.dockerfile import BuildPlan, Copy, Run, build_plan
from deployments.sandbox.providers.interface import SandboxRefused


def plan(folder: Path, text: str) -> BuildPlan:
    (folder / "Dockerfile").write_text(text)
    return build_plan(folder)


def copied(folder: Path, text: str) -> set[str]:
    """The paths of the only step that copies."""
    [step] = [step for step in plan(folder, f"FROM a\nWORKDIR /app\n{text}").steps if isinstance(step, Copy)]
    return set(step.files)


def test_variables_folders_and_commands_follow_earlier_instructions(tmp_path: Path) -> None:
    made = plan(
        tmp_path,
        '# syntax\nFROM a AS b\nARG N=1\nENV A=x${N} B="two words"\nWORKDIR /app\nWORKDIR sub\n'
        'RUN echo $A \\\n  # a comment\n  && true\nRUN [ "$A" = x1 ] && true\nCMD sleep\nEXPOSE 80',
    )
    shell, tested = [step for step in made.steps if isinstance(step, Run) and "mkdir" not in step.command]
    assert shell.command == "echo $A && true"
    assert (shell.workdir, shell.environment) == ("/app/sub", {"N": "1", "A": "x1", "B": "two words"})
    assert tested.command == '[ "$A" = x1 ] && true'
    assert (made.workdir, made.environment["B"], "N" in made.environment) == ("/app/sub", "two words", False)


def test_copies_go_where_docker_puts_them(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    for name in ("d/one.txt", "d/e/two.txt", "x.py", "y.py"):
        (tmp_path / name).write_text(name)
    assert copied(tmp_path, "COPY d /data") == {"/data/one.txt", "/data/e/two.txt"}
    assert copied(tmp_path, "COPY x.py main.py") == {"/app/main.py"}
    assert copied(tmp_path, "COPY x.py .") == copied(tmp_path, "COPY x.py /app") == {"/app/x.py"}
    assert copied(tmp_path, "COPY *.py src/") == {"/app/src/x.py", "/app/src/y.py"}
    assert copied(tmp_path, "COPY x.py y.py /src/") == {"/src/x.py", "/src/y.py"}
    assert copied(tmp_path, "COPY . /all") >= {"/all/Dockerfile", "/all/d/e/two.txt"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("USER someone", "line 2 of the Dockerfile, `USER someone`, is not carried out"),
        ("FROM b", "FROM b.*is not carried out"),
        ("RUN --mount=type=cache,target=/x true", "is not carried out .* RUN with a line of shell"),
        ("RUN <<EOF", "is not carried out"),
        ('RUN ["ls", "-l"]', "is not carried out"),
        # A shell would take it for a test that holds.
        ('RUN [ "/setup.sh" ]', "is not carried out"),
        ("COPY --from=b /x /y", "is not carried out .* without options"),
        ('COPY ["x", "/y"]', "is not carried out"),
        ("ADD https://example.org/x /y", "is not carried out"),
        ("COPY nothing /y", "copies 'nothing', which is not in"),
        ("COPY ../secret /y", "which is not in"),
        ("COPY x", "needs a source and a destination"),
        ("ENV A b", "is not of the form"),
        ("ENV A='b", "line 2 of the Dockerfile, `ENV A='b`, cannot be read: No closing quotation"),
    ],
)
def test_what_would_mean_something_else_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "secret").write_text("")
    with pytest.raises(SandboxRefused, match=message):
        plan(tmp_path / "context", f"FROM a\n{line}")


def test_a_file_without_from_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxRefused, match="cannot be read"):
        build_plan(tmp_path)
    (tmp_path / "Dockerfile").write_bytes(b"FROM a\n# d\xe9j\xe0\n")
    with pytest.raises(SandboxRefused, match=r"/Dockerfile is not UTF-8: .*0xe9.* Convert the file\.$"):
        build_plan(tmp_path)
    with pytest.raises(SandboxRefused, match="has no FROM"):
        plan(tmp_path, "RUN true")
