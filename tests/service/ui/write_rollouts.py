"""Writes files of rollouts for the tests of the page, with the client's own writers.

    python -m tests.service.ui.write_rollouts FOLDER [--many 10000]

`few.jsonl` and `few.parquet` hold the same response, `run.jsonl` its rollouts as `rollout run` writes them, and
`many.jsonl` so many rollouts.
"""

import argparse
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout_client import RolloutResponse
from rollout_client.contract.rollouts import SampleResult
from rollout_client.data_out.files import json_line

END, USER, ASSISTANT, NEWLINE = 261, 258, 259, 10
"""Ids of the embedded tokenizer, whose other ids are bytes."""
SENTENCES = ("Zwölf and 30 are \\boxed{42}", "First the tens: 10 + 30 = 40.\nThen the ones. \\boxed{42}", "\\boxed{41}")
GENERATIONS = 4


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def generated(text: str, reward: float, draw: random.Random, version: int) -> dict[str, Any]:
    token_ids = [*ids_of(text), END]
    cut, end = len(token_ids) // 2, len(token_ids)
    logprobs = [math.log(draw.random() ** 0.3) if draw.random() < 0.3 else -0.01 for _ in token_ids]
    spans = [{"version": str(version), "start": 0, "end": cut}, {"version": str(version + 1), "start": cut, "end": end}]
    return {
        "role": "assistant",
        "content": text,
        "token_ids": token_ids,
        "generation_logprobs": logprobs,
        "finish_reason": "stop",
        "weight_versions": spans,
        "reward": reward,
    }


def given(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text, "token_ids": [USER, NEWLINE, *ids_of(text), END, NEWLINE]}


def rollout(row: int, generation: int, draw: random.Random) -> SampleResult:
    """Sample 1 has three turns. The last rollout of sample 2 has failed."""
    turns = 3 if row % 3 == 1 else 1
    failed = row % 3 == 2 and generation == GENERATIONS - 1
    log, rewards = [given("user", f"What is {row} + 30?")], []
    for turn in range(turns):
        text = SENTENCES[(row + generation + turn) % len(SENTENCES)]
        rewards.append(float("42" in text) if turn == turns - 1 else 0.25)
        log += [
            generated(text, rewards[-1], draw, 6 + row % 2),
            given("user", "Go on." if turn < turns - 1 else "Done."),
        ]
    total = None if failed else sum(rewards)
    lengths = [len(message["token_ids"]) for message in log if "reward" in message]
    ends = {"terminated": not failed, "truncated": False, "max_turns_reached": False}
    error = {"kind": "environment", "message": "The process of the environment has ended.", "retryable": True}
    return SampleResult.model_validate(
        {
            "id": f"sample-{row}",
            "idx": row,
            "generation_index": generation,
            "task_name": ("math", "steps", "shaky")[row % 3],
            "message_log": log,
            "total_reward": total,
            "rewards": {} if failed else {"reward": total},
            "status": "error" if failed else "completed",
            "error": error if failed else None,
            **ends,
            "extra_env_info": {"ground_truth": "42"},
            "metrics": {
                "turn_count": turns,
                "total_tokens": sum(lengths),
                "assistant_tokens": sum(lengths),
                "env_tokens": 10 * turns,
                **ends,
                "total_reward": total,
                "turn_gen_tokens": lengths,
            },
        }
    )


def rollouts(count: int) -> Iterator[SampleResult]:
    draw = random.Random(7)
    return (rollout(at // GENERATIONS, at % GENERATIONS, draw) for at in range(count))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--many", type=int, default=10_000)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    few = list(rollouts(12))
    response = RolloutResponse.model_validate(
        {"request_id": "r", "metrics": {}, "policy": {"oldest": "6", "newest": "8"}, "samples": few}
    )
    response.save(folder / "few.jsonl")
    response.save(folder / "few.parquet")
    with (folder / "run.jsonl").open("wb") as file:
        file.writelines(json_line(one, input_row=at // GENERATIONS) for at, one in enumerate(few))
    with (folder / "many.jsonl").open("wb") as file:
        file.writelines(json_line(one, input_row=at // GENERATIONS) for at, one in enumerate(rollouts(arguments.many)))


if __name__ == "__main__":
    main()
