"""What batching gains for a reward model, through its deployment: `make bench-reward-model`.

A Llama for sequence classification with random weights, 128 wide, scores conversations of about 60 tokens: one after
the other, many at once with batches of one, and many at once batched. The caller is the client that environments have,
the replica that of the service, on Ray Serve. The last line is JSON.
"""

import asyncio
import json
import logging
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.models.clients import RemoteRewardModel
from deployments.models.settings import RewardModelSettings
from rollout_env import ChatMessage

TINY_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny"
CHARACTERS = 40
"""Of a reply; with the template's own tokens about 60."""


def write_reward_model(folder: Path, hidden_size: int, layers: int) -> None:
    """A model with random weights, and the tokenizer of the embedded model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    fields: dict[str, Any] = {"num_labels": 1}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        **fields,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    model: Any = LlamaForSequenceClassification
    model(config).save_pretrained(folder)


def conversations(count: int) -> list[list[ChatMessage]]:
    draw = random.Random(0)
    texts = ["".join(draw.choices("0123456789 +-", k=CHARACTERS)) for _ in range(count)]
    return [[{"role": "user", "content": "Q"}, {"role": "assistant", "content": text}] for text in texts]


async def one_by_one(model: RemoteRewardModel, asked: list[list[ChatMessage]]) -> float:
    """Scores a second."""
    await model.score(asked[0])
    started = time.monotonic()
    for conversation in asked:
        await model.score(conversation)
    return len(asked) / (time.monotonic() - started)


async def at_once(model: RemoteRewardModel, asked: list[list[ChatMessage]], count: int) -> float:
    """Scores a second, `count` at once."""
    slots = asyncio.Semaphore(count)

    async def score(conversation: list[ChatMessage]) -> float:
        async with slots:
            return await model.score(conversation)

    await asyncio.gather(*map(score, asked[:count]))
    started = time.monotonic()
    await asyncio.gather(*map(score, asked))
    return len(asked) / (time.monotonic() - started)


async def measured(batched: Any, single: Any, asked: list[list[ChatMessage]], concurrency: int) -> dict[str, float]:
    """Scores a second, by way of asking. Args: `batched` and `single` are handles of deployments."""
    of_batches, of_one = RemoteRewardModel("batched", batched), RemoteRewardModel("single", single)
    return {
        "one_by_one": await one_by_one(of_batches, asked[: len(asked) // 4]),
        "at_once_in_batches_of_one": await at_once(of_one, asked, concurrency),
        "at_once_batched": await at_once(of_batches, asked, concurrency),
    }


def main(
    scores: Annotated[int, typer.Option(help="Of each measurement.")] = 1024,
    hidden_size: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option(help="Of the model.")] = 4,
    concurrency: Annotated[int, typer.Option(help="Conversations at once.")] = 128,
) -> None:
    import ray
    from ray import serve

    from deployments.models.reward_replica import RewardModelReplica
    from service.startup.local_service import require_cluster_token

    asked = conversations(scores)
    with tempfile.TemporaryDirectory() as folder:
        write_reward_model(Path(folder), hidden_size, layers)
        # Each replica has all cores, and only one is asked at a time.
        cores = os.cpu_count() or 1
        require_cluster_token()
        ray.init(
            address="local",
            num_cpus=2 * cores + 1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        try:
            replica = serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": cores})(
                RewardModelReplica
            )
            batched = serve.run(replica.bind(RewardModelSettings(model=folder)), name="batched", route_prefix=None)
            single = serve.run(
                replica.bind(RewardModelSettings(model=folder, max_batch_tokens=1)), name="single", route_prefix=None
            )
            found = asyncio.run(measured(batched, single, asked, concurrency))
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()
    gains = {name: round(found["at_once_batched"] / rate, 1) for name, rate in found.items()}
    result = {
        "scores_per_s": {name: round(rate, 1) for name, rate in found.items()},
        "batched_over": {name: gain for name, gain in gains.items() if name != "at_once_batched"},
        "hidden_size": hidden_size,
        "layers": layers,
        "cores": cores,
    }
    typer.echo(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
