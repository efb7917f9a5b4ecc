"""What slime's and miles' own rollout functions get from a service: `python trainer_program.py TRAINER JOBS RESULTS`.

It runs with the trainer's sources on the path, unmodified. Stood in for: the command line, whose options are None where
a job does not say; the data set, by a list of prompts; the reward, by a number; and what does not install beside a
service: `pylatexenc`, which grades mathematics, SGLang's router, of which miles asks the version, and two modules of
miles that import SGLang: its dumper of tensors, and helpers of its chat templates. `JOBS` is JSON with the address and
the jobs, `RESULTS` becomes JSON with the samples of each.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any


class Options(Namespace):
    """Options of a trainer's command line."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Prompts:
    """A trainer's data source. Samples that come back are played first, as trainers' own do."""

    def __init__(self, kind: Any, prompts: list[str], each: int) -> None:
        groups = range(len(prompts))
        self.groups = [
            [kind(group_index=group, index=group * each + place, prompt=prompts[group]) for place in range(each)]
            for group in groups
        ]

    def get_samples(self, count: int) -> list[list[Any]]:
        taken, self.groups = self.groups[:count], self.groups[count:]
        return taken

    def add_samples(self, groups: list[list[Any]]) -> None:
        self.groups = groups + self.groups


async def reward(_args: Any, _sample: Any, **_options: Any) -> float:
    return 1.0


async def dumps_nothing(_args: Any) -> None:
    """No tensors of SGLang are dumped."""


def is_not_inkling(*_given: Any) -> bool:
    return False


def stand_in(name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def options_of(job: dict[str, Any], url: str, model: str) -> Options:
    host, _, port = url.removeprefix("http://").partition(":")
    return Options(
        hf_checkpoint=model,
        sglang_router_ip=host,
        sglang_router_port=port,
        sglang_router_policy="round_robin",
        sglang_server_concurrency=64,
        rollout_num_engines=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        eval_num_gpus=0,
        rollout_global_dataset=True,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_skip_special_tokens=False,
        custom_rm_path="trainer_program.reward",
        lora_rank=0,
        **job["options"],
    )


def shown(groups: list[list[Any]]) -> list[dict[str, Any]]:
    """The samples as they are now: a later round changes their lists."""
    return [
        {
            "index": sample.index,
            "tokens": list(sample.tokens),
            "response_length": sample.response_length,
            "log_probs": list(sample.rollout_log_probs or ()),
            "status": sample.status.value,
            "weight_versions": list(sample.weight_versions),
        }
        for group in groups
        for sample in group
    ]


def of_slime(args: Options, prompts: Any) -> tuple[list[Any], list[Any]]:
    """The groups that a rollout of slime's has, and those that it left."""
    from slime.rollout.sglang_rollout import GenerateState, generate_rollout
    from slime.utils.http_utils import init_http_client
    from slime.utils.misc import SingletonMeta

    SingletonMeta._instances.pop(GenerateState, None)  # noqa: SLF001 - slime has one for each process
    init_http_client(args)
    made = generate_rollout(args, 0, prompts)
    return made.samples, prompts.groups


def of_miles(args: Options, prompts: Any) -> tuple[list[Any], list[Any]]:
    from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
    from miles.rollout.inference_rollout.compatibility import call_rollout_function
    from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
    from miles.utils.http_utils import init_http_client

    init_http_client(args)
    play = InferenceRolloutFn(RolloutFnConstructorInput(args=args, data_source=prompts))
    made = call_rollout_function(play, RolloutFnTrainInput(rollout_id=0))
    return made.samples, prompts.groups


def sample_type(trainer: str) -> Any:
    if trainer == "slime":
        from slime.utils.types import Sample

        return Sample
    from miles.utils.types import Sample as MilesSample

    return MilesSample


def main(trainer: str, jobs: Path, results: Path) -> None:
    stand_in("pylatexenc", latex2text=None)
    stand_in("sglang_router", __version__="0.3.0")
    if trainer == "miles":
        stand_in("miles.utils.dumper_utils", configure_sglang=dumps_nothing)
        stand_in("miles.utils.chat_template_utils")
        stand_in("miles.utils.chat_template_utils.inkling", is_inkling_checkpoint=is_not_inkling)
    asked = json.loads(jobs.read_text())
    play = of_slime if trainer == "slime" else of_miles
    answered = {}
    for name, job in asked["jobs"].items():
        args = options_of(job, asked["url"], asked["model"])
        prompts = Prompts(sample_type(trainer), job["prompts"], job["options"]["n_samples_per_prompt"])
        rounds = []
        for _ in range(job.get("rounds", 1)):
            made, left = play(args, prompts)
            rounds.append({"samples": shown(made), "left": shown(left)})
        answered[name] = rounds
    results.write_text(json.dumps(answered))


if __name__ == "__main__":
    # `custom_rm_path` names this file as a module.
    sys.modules["trainer_program"] = sys.modules["__main__"]
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
