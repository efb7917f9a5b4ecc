"""What an adapter costs a generation on processors: `make bench-adapters`.

The bare engine with SmolLM2-135M-Instruct generates without an adapter and with one of rank 8 on all linear layers, in
turns. The last line is JSON: tokens a second of both, and their ratio.
"""

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from benchmarks.bare_engine import BareEngine
from deployments.generation.settings import EngineSettings
from models.smollm2.recipe import made
from service.startup.generated_config import ServedModel, engine_of
from service.startup.local_service import sentences_for_the_user

RANK = 8
PROMPT_TOKENS, NEW_TOKENS = 40, 48
WAYS = ("without", "with an adapter")
console = Console(stderr=True)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    sequences: Annotated[int, typer.Option(min=1, help="At once.")] = 64,
) -> None:
    with sentences_for_the_user(console), TemporaryDirectory() as adapter:
        folder = made(console)
        write_adapter(folder, adapter)
        served = ServedModel(str(folder), 0, engine={"enable_lora": True, "max_lora_rank": RANK})
        settings = EngineSettings.model_validate(engine_of(served))
        seconds: dict[str, list[float]] = defaultdict(list)
        with BareEngine.started(settings) as engine:
            for way in WAYS:
                engine.run(generate(engine.llm, sequences, adapter if way != "without" else None))
            for _ in track(range(rounds), "Generating", console=console):
                for way in WAYS:
                    began = perf_counter()
                    engine.run(generate(engine.llm, sequences, adapter if way != "without" else None))
                    seconds[way].append(perf_counter() - began)
    speeds = {way: round(sequences * NEW_TOKENS / median(taken), 1) for way, taken in seconds.items()}
    without, with_one = (speeds[way] for way in WAYS)
    typer.echo(json.dumps({"tokens_per_second": speeds, "ratio": round(with_one / without, 2)}))


def write_adapter(folder: Path, adapter: str) -> None:
    """With random values: how fast it is does not depend on them."""
    untyped: Any = AutoModelForCausalLM
    model = untyped.from_pretrained(folder, dtype=torch.bfloat16)
    lora = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(adapter)


async def generate(llm: Any, sequences: int, adapter: str | None) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    lora = None if adapter is None else LoRARequest("adapter", 1, adapter)

    async def one(number: int) -> None:
        prompt = {"prompt_token_ids": [*range(100, 100 + PROMPT_TOKENS)]}
        async for _ in llm.generate(prompt, params, f"{adapter}-{number}-{perf_counter()}", lora_request=lora):
            pass

    await asyncio.gather(*map(one, range(sequences)))


if __name__ == "__main__":
    typer.run(main)
