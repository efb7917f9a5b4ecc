"""inspect-ai: what the model writes. `questions.jsonl` of the folder that inspect runs in has the questions."""

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate

LAST_NUMBER = r"(\d+)\D*$"


@task  # type: ignore[untyped-decorator]
def sums() -> Task:
    return Task(
        dataset=json_dataset("questions.jsonl", FieldSpec(input="question", target="answer")),
        solver=generate(),
        scorer=pattern(LAST_NUMBER),
        config=GenerateConfig(temperature=0.0, max_tokens=32, stop_seqs=["\n"]),
    )
