"""What a reply says: its code, its answer."""

import re

FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
PYTHON = {"", "python", "py", "python3"}


def last_code_block(reply: str) -> str | None:
    """The last Markdown block of Python, or without a language; None without one. Other languages are passed over."""
    blocks = [match[2] for match in FENCE.finditer(reply) if match[1].lower() in PYTHON]
    return blocks[-1] if blocks else None
