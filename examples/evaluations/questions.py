"""Questions for evaluations, a line of JSON each: `python -m examples.evaluations.questions questions.jsonl`.

They are the same each time, so that every harness asks every model the same.
"""

import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LARGEST = 12


def questions() -> Iterator[Mapping[str, Any]]:
    """Each has a `question`, its `answer`, four `choices`, and the `label`, which is the index of the right one."""
    draw = random.Random(0)
    for one in range(1, LARGEST + 1):
        for other in range(1, LARGEST + 1):
            answer = one + other
            choices = draw.sample(
                [answer, *draw.sample([answer - 2, answer - 1, answer + 1, answer + 2, 2 * answer], 3)], 4
            )
            yield {
                "question": f"What is {one} + {other}?",
                "answer": str(answer),
                "choices": [str(choice) for choice in choices],
                "label": choices.index(answer),
            }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(f"{json.dumps(question)}\n" for question in questions()))
