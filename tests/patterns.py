"""Patterns for the messages of failures."""

import re


def whole(text: str) -> str:
    """Matches this text alone, where `match` of `pytest.raises` looks for its pattern anywhere."""
    return rf"\A{re.escape(text)}\Z"
