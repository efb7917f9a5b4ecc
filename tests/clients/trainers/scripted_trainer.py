"""A scripted TRL trainer for tests of its adapters: dataset, arguments, and a client that keeps what is pushed."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import torch
from fastapi.responses import JSONResponse
from safetensors.torch import load

from rollout_client import RolloutClient
from rollout_client.contract.policy import PolicyLayout, PolicyState, PushResult, TensorLayout, VersionInfo
from rollout_client.weights.model_tensors import NAMES
from tests.clients.scripted_service import DIED, SUMMARY, Json, result

END = 261
FIRST_VERSION = 101
"""Of a `PushingClient`."""
ROWS: list[Json] = [
    {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "extra_env_info": {"ground_truth": "2"}},
    {"prompt": [{"role": "user", "content": "What is 1 + 2?"}], "extra_env_info": {"ground_truth": "3"}},
]
PROMPTS = [row["prompt"] for row in ROWS]
LOST: Json = {"status": "error", "total_reward": None, "error": DIED}

ON_PROCESSORS: Json = {
    "num_generations": 2,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "logging_steps": 1,
    "disable_tqdm": True,
}
"""Arguments of TRL's own trainers of the tiny model."""


class PushingClient(RolloutClient):
    """Keeps the weights that a service would have after each push, and sends nothing."""

    def __init__(self, base_url: str, **options: Any) -> None:
        super().__init__(base_url, **options)
        self.pushed: list[dict[str, torch.Tensor]] = []
        self.kinds: list[str] = []
        self.adapters: list[tuple[Any, str | None]] = []
        """The modules that were pushed as adapters, each with the name of its policy."""
        self.failure: BaseException | None = None
        self.layout = layout_of(torch.nn.Linear(1, 1).state_dict())

    @property
    def policy(self) -> Any:
        return SimpleNamespace(state=self._state, layout=lambda **_: self.layout)

    def _state(self, **_: Any) -> PolicyState:
        current = FIRST_VERSION + len(self.pushed) - 1
        info = VersionInfo(version=current, kind="full", created_at=datetime(2026, 1, 1, tzinfo=UTC))
        return PolicyState(current=current, versions=[info], replicas=[])

    def push_weights(self, source: Any, version: int | None = None, **options: Any) -> PushResult:
        if self.failure is not None:
            raise self.failure
        if options["kind"] == "adapter":
            self.adapters.append((source, options["name"]))
            return PushResult(version=FIRST_VERSION, checksum=None, replicas=[], sent_bytes=1, push_s=1.0)
        sent = load(b"".join(bytes(block) for block in source.blocks()))
        self.kinds.append(options["kind"])
        self.pushed.append(sent if options["base"] is None else applied(sent, self.pushed[-1]))
        version = FIRST_VERSION + len(self.pushed) - 1
        return PushResult(version=version, checksum=options["checksum"], replicas=[], sent_bytes=1, push_s=1.0)


def layout_of(state: Mapping[str, torch.Tensor]) -> PolicyLayout:
    return PolicyLayout(
        tensors={
            name: TensorLayout(dtype=NAMES[tensor.dtype], shape=list(tensor.shape)) for name, tensor in state.items()
        }
    )


def applied(delta: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = {name: tensor.clone() for name, tensor in base.items()}
    for name, tensor in weights.items():
        if (gaps := delta.get(f"{name}.gaps")) is not None:
            tensor.reshape(-1)[gaps.cumsum(0)] = delta[f"{name}.values"]
    return weights


def prompt_message(content: str = "") -> Json:
    return {"role": "user", "content": content, "token_ids": [258, 10, 87, 261]}


def response_message(*token_ids: int, version: int = 0, finish_reason: str = "stop") -> Json:
    return {
        "role": "assistant",
        "content": "said",
        "token_ids": list(token_ids),
        "generation_logprobs": [-0.5] * len(token_ids),
        "finish_reason": finish_reason,
        "weight_versions": [{"version": str(version), "start": 0, "end": len(token_ids)}],
    }


def two_turns(version: int = 0, newer: int | None = None) -> list[Json]:
    feedback = {"role": "environment", "content": "no", "token_ids": [20, 21]}
    last = response_message(32, END, version=version if newer is None else newer)
    return [prompt_message(), response_message(30, 31, version=version), feedback, last, feedback]


def answering(*fields: Json, log: list[Json] | None = None) -> Callable[[Json], JSONResponse]:
    """Answers with rollouts of `log` (default: two turns); rollout i has reward i and `fields[i % len(fields)]`."""

    def answer(body: Json) -> JSONResponse:
        generations = body.get("num_generations", 1)
        version = body.get("policy", {}).get("min_version", 0)
        samples = []
        for place in range(len(body["samples"]) * generations):
            said: Json = {"message_log": log or two_turns(version), "total_reward": float(place), "answer": str(place)}
            said |= fields[place % len(fields)] if fields else {}
            turns = sum("generation_logprobs" in message for message in said["message_log"])
            said["metrics"] = result()["metrics"] | {"turn_count": turns}
            samples.append(result(place // generations, place % generations, **said))
        return JSONResponse({**SUMMARY, "samples": samples})

    return answer


def trainer_args(**changed: Any) -> SimpleNamespace:
    said: Json = {"temperature": 0.75, "top_p": 0.9, "top_k": 5, "max_completion_length": 8, "repetition_penalty": 1.0}
    unset = dict.fromkeys(("min_p", "generation_kwargs", "chat_template_kwargs"))
    return SimpleNamespace(**said | unset | changed)


class OneProcess:
    """The part of `accelerate.Accelerator` that the adapters use, for a trainer with one process."""

    is_main_process = True
    distributed_type = "NO"

    def unwrap_model(self, model: Any) -> Any:
        return model


def trainer(rows: Any = None, **args: Any) -> SimpleNamespace:
    def tokenizer(text: str) -> Json:
        return {"input_ids": [ord(letter) for letter in text]}

    processing_class = cast(Any, tokenizer)
    processing_class.pad_token_id = 256
    return SimpleNamespace(
        args=trainer_args(**args),
        processing_class=processing_class,
        model=torch.nn.Linear(1, 1),
        train_dataset=ROWS if rows is None else rows,
        eval_dataset=None,
        state=SimpleNamespace(global_step=0),
        accelerator=OneProcess(),
    )
