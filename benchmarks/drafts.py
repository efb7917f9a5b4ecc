"""Tokens a second with drafts and without, by what is generated and how many run: `python -m benchmarks drafts`.

Two engines of one config, one of them with `--drafts`, play the same prompts in turn. The last line is JSON.
"""

import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
import yaml
from prometheus_client import REGISTRY
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.bare_engine import BareEngine, engine_in
from benchmarks.process_group import no_process_left
from deployments.generation.settings import EngineSettings

NGRAM = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
NAMES = ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ida", "Jan", "Kai", "Lea")
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
console = Console(stderr=True)


def prompts_of(draw: random.Random) -> dict[str, str]:
    """One prompt of each kind; no two draws give the same."""
    who, other = draw.sample(NAMES, 2)
    first, second, third = (draw.randrange(100, 1000) for _ in range(3))
    passage = (
        f"{who} left the harbour of Port {other} on day {first} with {second} barrels of salt. A storm took the mast, "
        f"and {who} came back on foot {third} days later, with a letter from the keeper of the northern light."
    )
    code = (
        f"def total_{first}(rows):\n    total = {second}\n    for row in rows:\n        if row.price > {third}:\n"
        "            total += row.price * row.count\n    return total\n"
    )
    tool = json.dumps([{"id": first, "name": who, "balance": second}, {"id": third, "name": other, "balance": 0}])
    return {
        "tool agent": f"The tool get_accounts returned:\n{tool}\nRepeat its result, and say whose balance is 0.",
        "retrieval": f"{passage}\n\nQuote the passage above word for word.",
        "code editing": f"{code}\nWrite this function again, with `price` renamed to `cost`.",
        "math": f"What is {first} + {second}? Think step by step.",
    }


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    model: str = "models/smollm2",
    drafts: Annotated[str, typer.Option(help="`engine.speculative_config`, JSON.")] = NGRAM,
    running: Annotated[str, typer.Option(help="How many generate at once.")] = "1 4 16 64",
    new_tokens: int = 48,
    temperature: float = 0.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    plain = engine_in(yaml.safe_load(config.read_text())).model_dump(exclude_unset=True)
    plain |= {"model": model, "tokenizer": model}
    without, drafting = map(EngineSettings.model_validate, (plain, plain | {"speculative_config": json.loads(drafts)}))
    tokenizer, figures = AutoTokenizer.from_pretrained(model), dict[str, dict[str, float]]()
    sampling = {"temperature": temperature, "max_tokens": new_tokens, "ignore_eos": True}
    with (
        no_process_left(),
        BareEngine.started(without, holds_outputs=True) as off,
        BareEngine.started(drafting, holds_outputs=True) as on,
    ):
        cases = [(kind, count) for count in map(int, running.split()) for kind in prompts_of(random.Random(0))]
        for kind, count in track(cases, "Generating", console=console):
            name, seconds, accepted = f"{kind}, {count}", dict[BareEngine, list[float]]({off: [], on: []}), 0.0
            for each in range(rounds + 1):
                prompts = [tokens_of(tokenizer, kind, f"{name} {each} {place}") for place in range(count)]
                for engine, taken in seconds.items():
                    before, began = accepted_drafts(), time.perf_counter()
                    engine.run(engine.play(prompts, 1, (), sampling, f"{name} {each}"))
                    # The first round warms up.
                    taken += [time.perf_counter() - began] if each else []
                    accepted += accepted_drafts() - before if each else 0.0
            made = rounds * count * new_tokens
            figures[name] = {
                "tokens_per_s": round(count * new_tokens / median(seconds[off])),
                "with_drafts": round(median(seconds[off]) / median(seconds[on]), 2),
                "tokens_a_step": round(made / (made - accepted), 2),
            }
    table = Table("", "tokens/s without", "times with drafts", "tokens a step")
    for name, row in figures.items():
        table.add_row(name, *map(str, row.values()))
    console.print(table)
    typer.echo(json.dumps(figures))


def tokens_of(tokenizer: Any, kind: str, seed: str) -> list[int]:
    messages = [{"role": "user", "content": prompts_of(random.Random(seed))[kind]}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def accepted_drafts() -> float:
    """How many tokens have been accepted, of the engine that drafts."""
    counted = (sample for metric in REGISTRY.collect() if metric.name == ACCEPTED for sample in metric.samples)
    return sum(sample.value for sample in counted if sample.name.endswith("_total"))


if __name__ == "__main__":
    typer.run(main)
