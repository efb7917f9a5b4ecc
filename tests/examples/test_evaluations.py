"""Evaluation harnesses against the running service, beside lm-eval's own way with transformers: `make test-evals`.

Elsewhere they are not there, and this file is not collected. In float32 both must say the same. In bfloat16 they may
differ where a next token is as likely as another one: the test measures how likely, with the weights in float32.
"""

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.evaluations.questions import questions
from examples.task_configs import config_for
from service.startup.local_service import local_service
from tests.paths import REPOSITORY

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]
MODEL = REPOSITORY / "models" / "smollm2"
TOOLS = Path(os.environ["ROLLOUT_EVALS"], "bin")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "SERVICE_API_KEY": "any", "INSPECT_DISPLAY": "plain"}
NEAR_TIE = 1.0
"""Difference of two log-probabilities in float32 that bfloat16 may turn round: transformers' own bfloat16 does too."""
logger = logging.getLogger(__name__)
Samples = Mapping[int, Any]


class Harnesses:
    """Runs harnesses in a folder that has the questions."""

    def __init__(self, folder: Path, url: str, dtype: str) -> None:
        self.dtype = dtype
        self._folder = folder
        self._url = url
        shutil.copytree(REPOSITORY / "examples" / "evaluations", folder, dirs_exist_ok=True)
        lines = (f"{json.dumps(question)}\n" for question in questions())
        (folder / "questions.jsonl").write_text("".join(lines))
        api = f"model=smollm2,tokenizer={MODEL},base_url={url}/v1/completions?version=0,max_length=4096"
        self.served = self._lm_eval(
            "service", "--model", "local-completions", "--model_args", f"{api},num_concurrent=16"
        )
        self.batched = self._lm_eval(
            "batches", "--model", "local-completions", "--model_args", api, "--batch_size", "16"
        )
        local = f"pretrained={MODEL},dtype={dtype}"
        self.transformers = self._lm_eval(
            "hf", "--model", "hf", "--model_args", local, "--device", "cpu", "--batch_size", "8"
        )

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [TOOLS / program, *arguments],
            cwd=self._folder,
            env=os.environ | OFFLINE,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def _lm_eval(self, output: str, *arguments: str) -> Mapping[str, Samples]:
        """The samples of both tasks."""
        tasks = ("--tasks", "sums,sums_choice", "--include_path", ".", "--apply_chat_template", "--log_samples")
        self._run("lm_eval", "run", *arguments, *tasks, "--output_path", output)
        found = {}
        for task in ("sums", "sums_choice"):
            [written] = (self._folder / output).glob(f"*/samples_{task}_2*.jsonl")
            samples = [json.loads(line) for line in written.read_text().splitlines()]
            found[task] = {sample["doc_id"]: sample for sample in samples}
            assert len(found[task]) == len(list(questions()))
        return found

    def inspected(self) -> Mapping[int, str]:
        """What the model said to inspect-ai."""
        model = ("--model", "openai-api/service/smollm2", "--model-base-url", f"{self._url}/v1")
        self._run("inspect", "eval", "sums.py", *model, "--log-format", "json", "--log-dir", "logs")
        [written] = (self._folder / "logs").glob("*.json")
        log = json.loads(written.read_text())
        assert log["status"] == "success"
        return {sample["id"] - 1: sample["output"]["completion"] for sample in log["samples"]}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def harnesses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harnesses]:
    config = config_for(REPOSITORY / "serve_config.cpu.yaml", MODEL, ("math",))
    [application] = config.applications
    application.args["engine"]["dtype"] = request.param
    with local_service(config, Console(stderr=True)) as url:
        yield Harnesses(tmp_path_factory.mktemp("evals"), url, request.param)


def said_in(samples: Samples) -> Mapping[int, str]:
    return {place: sample["resps"][0][0] for place, sample in samples.items()}


def scores_in(samples: Samples) -> Mapping[int, list[float]]:
    """The log-probability of each choice."""
    return {place: [float(score) for score, _ in sample["filtered_resps"]] for place, sample in samples.items()}


def best(scores: list[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def test_greedy_answers_are_those_of_transformers(harnesses: Harnesses) -> None:
    mine, theirs = (said_in(of["sums"]) for of in (harnesses.served, harnesses.transformers))
    different = [place for place in mine if mine[place] != theirs[place]]
    prompts = [harnesses.served["sums"][place]["arguments"]["gen_args_0"]["arg_0"] for place in different]
    gaps = [gap(prompt, mine[place], theirs[place]) for prompt, place in zip(prompts, different, strict=True)]
    equal = len(mine) - len(different)
    logger.info(
        "%s: %d of %d answers are equal; gaps of the others: %s", harnesses.dtype, equal, len(mine), sorted(gaps)
    )
    assert harnesses.dtype == "bfloat16" or not different
    assert max(gaps, default=0.0) < NEAR_TIE


def test_choices_are_those_of_transformers(harnesses: Harnesses) -> None:
    mine, theirs = (scores_in(of["sums_choice"]) for of in (harnesses.served, harnesses.transformers))
    differences = [abs(a - b) for place in mine for a, b in zip(mine[place], theirs[place], strict=True)]
    others = [place for place in mine if best(mine[place]) != best(theirs[place])]
    gaps = [theirs[place][best(theirs[place])] - theirs[place][best(mine[place])] for place in others]
    logger.info(
        "%s: %d of %d choices are equal, their log-probabilities within %.5f in the mean and %.5f at most; "
        "gaps of the others: %s",
        *(harnesses.dtype, len(mine) - len(others), len(mine)),
        *(sum(differences) / len(differences), max(differences), sorted(gaps)),
    )
    assert max(gaps, default=0.0) < NEAR_TIE
    if harnesses.dtype == "float32":
        assert (others, max(differences) < 1e-3) == ([], True)


def test_prompts_in_batches_are_answered_as_those_one_by_one(harnesses: Harnesses) -> None:
    for task in ("sums", "sums_choice"):
        one_by_one, batched = harnesses.served[task], harnesses.batched[task]
        assert {place: one["resps"] for place, one in batched.items()} == {
            place: one["resps"] for place, one in one_by_one.items()
        }


def test_inspect_is_answered_as_lm_eval_is(harnesses: Harnesses) -> None:
    assert harnesses.inspected() == said_in(harnesses.served["sums"])


def gap(prompt: str, mine: str, theirs: str) -> float:
    """How much likelier, in float32, one answer's next token is than the other's where they begin to differ."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    [line_end] = tokenizer.encode("\n")
    ends = [tokenizer.eos_token_id, line_end]
    one, other = ([*tokenizer.encode(text), None] for text in (mine, theirs))
    same = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    ids = tokenizer.encode(prompt, add_special_tokens=False) + one[:same]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    first, second = (float(logprobs[ends if token is None else [token]].max()) for token in (one[same], other[same]))
    return abs(first - second)
