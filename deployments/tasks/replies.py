"""Answers and code in the text of a reply, and outcomes that are told in text. Pure functions of linear time.

The forms of an answer:

- `any`: wherever math-verify finds it: in boxes, of which several may belong together, else in formulas or numbers.
- `boxed`: in the last box, and nowhere else.
- `answer_line`: behind the last `Answer:`, as the prompts of DAPO ask for it.
- `choice`: the letter of a choice, in the last box or behind the last `Answer:`.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from rollout_env import StepOutcome

_OPENING = re.compile(r"([ \t]*+(?>(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?))(`{3,}+|~{3,}+)[ \t{.]*+([\w.+-]*+)")
_PYTHON = re.compile(r"(?:i?python|py)(?:3[\d.]*)?")
_TAB = 4


class _Fence(NamedTuple):
    """The line that opens a Markdown block, as CommonMark has it; within a list it may be indented further."""

    indent: int
    """Columns that are taken off each line of the block."""
    mark: str
    """Three or more backticks or tildes; one as long or longer ends the block."""
    language: str
    """The first word of the rest of the line, in lower case."""

    @classmethod
    def opened_by(cls, line: str) -> "_Fence | None":
        found = _OPENING.match(line)
        # Behind backticks, further ones are those of inline code.
        if found is None or (found[2][0] == "`" and "`" in line[found.end(2) :]):
            return None
        return cls(len(found[1].expandtabs(_TAB)), found[2], found[3].lower())

    def inside(self, line: str) -> str:
        """A line of the block without the indentation of its fence."""
        if self.indent == 0:
            return line
        text = line.lstrip(" \t")
        columns = len(line[: len(line) - len(text)].expandtabs(_TAB))
        return " " * (columns - self.indent) + text

    def is_closed_by(self, line: str) -> bool:
        """For a line that is `inside`."""
        mark = line.strip(" \t\r")
        indented = line[:_TAB].expandtabs(_TAB).startswith(" " * _TAB)
        return len(mark) >= len(self.mark) and not mark.strip(self.mark[0]) and not indented


def last_code_block(reply: str) -> str | None:
    """The last Markdown block marked Python; where none is, the last one without a language; None without one.

    Takes linear time: each line is read once.
    """
    blocks = list(_code_blocks(reply))
    marked = [code for language, code in blocks if _PYTHON.fullmatch(language)]
    candidates = marked or [code for language, code in blocks if language == ""]
    return candidates[-1] if candidates else None


def _code_blocks(reply: str) -> Iterator[tuple[str, str]]:
    """Language and content of each block. The end of the reply ends the last one, if there is anything in it."""
    fence: _Fence | None = None
    lines: list[str] = []
    for line in reply.removesuffix("\n").split("\n"):
        if fence is None:
            fence, lines = _Fence.opened_by(line), []
            continue
        inner = fence.inside(line)
        if fence.is_closed_by(inner):
            yield fence.language, "".join(lines)
            fence = None
        else:
            lines.append(f"{inner}\n")
    if fence is not None and any(map(str.strip, lines)):
        yield fence.language, "".join(lines)


AnswerForm = Literal["any", "boxed", "answer_line", "choice"]
_BOX_PARTS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]*)", re.IGNORECASE)
_BEGINS_WITH_ANSWER = re.compile(r"[ \t*]*answer[ \t*]*:", re.IGNORECASE)
_EMPHASIS = "* \t"
_LETTER = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?[\s(*]*([A-Za-z])(?:[\s)*}]*|[\s*}]*[).:].*)", re.DOTALL)
"""One letter, such as `B`, `(B)`, `\\text{B}` or `B. Because ...`."""


class Answer(NamedTuple):
    """The answer of a response."""

    text: str | None
    """The answer itself; None if there is none in the right place."""
    latex: str
    """The text from which math-verify reads the answer."""
    is_formatted: bool
    """Whether the response has the form that was asked for."""


def answer_in(response: str, form: AnswerForm) -> Answer:
    if form == "choice":
        return _choice_in(response)
    if form == "answer_line":
        return _answer_of_line(response)
    boxed = last_box(response)
    latex = response if form == "any" else "" if boxed is None else f"\\boxed{{{boxed}}}"
    return Answer(boxed, latex, is_formatted=boxed is not None)


def _answer_of_line(response: str) -> Answer:
    line = _last_answer_line(response)
    if line is None:
        return Answer(None, "", is_formatted=False)
    boxed = last_box(line)
    inner = line.strip("$") if boxed is None else boxed
    # With further dollar signs inside, the line is a text with formulas.
    latex = line if "$" in inner else f"\\boxed{{{inner}}}"
    last_line = response.rstrip().rpartition("\n")[2]
    begun = _BEGINS_WITH_ANSWER.match(last_line)
    return Answer(inner, latex, is_formatted=begun is not None and begun.end() < len(last_line))


def _choice_in(response: str) -> Answer:
    for given in (last_box(response), _last_answer_line(response)):
        if given is not None and (letter := letter_of(given)) is not None:
            return Answer(letter, letter, is_formatted=True)
    return Answer(None, "", is_formatted=False)


def _last_answer_line(response: str) -> str | None:
    """The text after the last `Answer:` up to the end of its line; None if that is empty."""
    lines = _ANSWER_LINE.findall(response)
    return lines[-1].strip(_EMPHASIS) or None if lines else None


def letter_of(text: str) -> str | None:
    """The letter of a choice, in upper case."""
    found = _LETTER.fullmatch(text.strip().strip("$"))
    return found[1].upper() if found else None


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}` with balanced braces, `None` without one. Takes linear time."""
    opened: list[tuple[int, bool]] = []
    last_start, content = -1, None
    for part in _BOX_PARTS.finditer(text):
        if part[0].endswith("{") and part[0] != "\\{":
            opened.append((part.end(), len(part[0]) > 1))
        elif part[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and start > last_start:
                last_start, content = start, text[start : part.start()]
    return content


def boxed_or_whole(text: str) -> str:
    """The content of the last box, or the whole text without one; stripped."""
    boxed = last_box(text)
    return (text if boxed is None else boxed).strip()


def last_tagged(text: str, tag: str) -> str | None:
    """The text between the last `<tag>` that is closed and its end, stripped; `None` without one. Takes linear time."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, after = before.rpartition(f"<{tag}>")
    return after.partition(f"</{tag}>")[0].strip() if opened and closed else None


def text_outcome(
    text: str, reward: float | dict[str, float] = 0.0, terminated: bool = False, **further: Any
) -> StepOutcome:
    """An outcome whose observation is a message of the user; `further` are other fields of the outcome."""
    return StepOutcome({"role": "user", "content": text}, reward, terminated, **further)
