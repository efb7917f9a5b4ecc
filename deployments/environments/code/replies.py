"""What a reply says: its code, its answer."""

import re

OPENING = re.compile(r"[ \t]*```[ \t]*(\w*)")
CLOSING = "```"
PYTHON = {"", "python", "py", "python3"}


def last_code_block(reply: str) -> str | None:
    """The last Markdown block of Python, or without a language; None without one. Other languages are passed over.

    Takes linear time: a fence that nothing closes is looked at once.
    """
    language: str | None = None
    block: list[str] = []
    last: list[str] | None = None
    for line in reply.split("\n"):
        if language is None:
            if (opened := OPENING.match(line)) is not None:
                language, block = opened[1].lower(), []
        elif line.strip(" \t\r") == CLOSING:
            last = block if language in PYTHON else last
            language = None
        else:
            block.append(f"{line}\n")
    return None if last is None else "".join(last)
