"""What a push costs of which one value in a hundred has changed, against a push of all weights: `make bench-delta`.

The embedded model, enlarged to 200 MB with random weights, is served by one replica. Rounds alternate: all weights by
`push_weights`; all weights by a new `PolicyPusher`, which copies them; then what changed, by the same one. The changed
values are spread evenly over all tensors, so that no tensor is as it was. The last line is JSON: the bytes that the
engine's node read and the seconds of a push, of the delta over those of `push_weights`.
"""

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from ray.serve.schema import ServeDeploySchema
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.process_group import no_process_left
from rollout_client import PolicyPusher, RolloutClient
from rollout_client.contract.policy import PushResult, ReplicaUpdate
from service.startup.config import free_port, read_config
from service.startup.local_service import local_service, sentences_for_the_user

State = dict[str, torch.Tensor]
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3328,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
"""14.4 million values a layer: 29 MB in bfloat16."""
LAYERS = 7
"""202 MB."""
STANDARD_DEVIATION = 0.02
CHANGED = 0.01
MB = 10**6
console = Console(stderr=True)


def main(
    config: Annotated[Path, typer.Argument()] = Path("serve_config.cpu.yaml"),
    model: Annotated[Path, typer.Option(help="The model that is enlarged.")] = Path("models/tiny"),
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    layers: Annotated[int, typer.Option(min=1, help="Of the enlarged model; 29 MB each.")] = LAYERS,
) -> None:
    measured: dict[str, list[PushResult]] = defaultdict(list)
    settings = read_config(config, port=free_port())
    with (
        enlarged(model, layers) as (folder, weights),
        sentences_for_the_user(console),
        no_process_left(),
        local_service(serving(settings, folder), console) as url,
        RolloutClient(url) as client,
    ):
        client.push_weights(weights)  # What is done once: the initial weights as one file, the first reload.
        for _ in track(range(rounds), "Pushing", console=console):
            measured["all weights"].append(checked(client.push_weights(weights)))
            measured["a checkpoint on a path"].append(checked(loaded(client, folder)))
            pusher = PolicyPusher(client)
            measured["all weights, by a pusher"].append(checked(pusher.push(weights)))
            change(weights)
            measured["what changed"].append(checked(pusher.push(weights)))
    report(measured)


@contextmanager
def enlarged(model: Path, layers: int) -> Iterator[tuple[Path, State]]:
    """A folder with the model at `SIZES`, with so many layers and random weights, and these weights."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "enlarged"
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
        described: dict[str, Any] = json.loads((model / "config.json").read_text()) | SIZES
        described["num_hidden_layers"] = layers
        (folder / "config.json").write_text(json.dumps(described))
        weights = random_weights(described)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        yield folder, weights


def random_weights(described: dict[str, Any]) -> State:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = LlamaForCausalLM(LlamaConfig(**described)).state_dict()  # type: ignore[no-untyped-call]
    shapes.pop("lm_head.weight")  # Tied to the embeddings, and not in the checkpoint.
    return {
        name: torch.ones(tensor.shape, dtype=torch.bfloat16)
        if tensor.ndim == 1
        else (torch.randn(tensor.shape) * STANDARD_DEVIATION).bfloat16()
        for name, tensor in shapes.items()
    }


def change(weights: State) -> None:
    """Changes the last bit of `CHANGED` of the values of each tensor."""
    for tensor in weights.values():
        bits = tensor.view(torch.int16).reshape(-1)
        count = max(round(CHANGED * bits.numel()), 1)
        bits[torch.randperm(bits.numel())[:count]] ^= 1


def serving(settings: ServeDeploySchema, folder: Path) -> ServeDeploySchema:
    [application] = settings.applications
    application.args["engine"] |= {"model": str(folder), "tokenizer": str(folder)}
    application.args["policy"] = {"checkpoint_roots": [str(folder)]}
    return settings


def loaded(client: RolloutClient, folder: Path) -> PushResult:
    began = time.perf_counter()
    update = client.load_checkpoint(folder)
    return PushResult(**dict(update), sent_bytes=0, push_s=time.perf_counter() - began)


def checked(update: PushResult) -> PushResult:
    """Raises `RuntimeError` if a replica has not swapped."""
    for replica in update.replicas:
        if replica.status != "swapped":
            raise RuntimeError(f"A replica was {replica.status}: {replica.error}")
    return update


def report(measured: dict[str, list[PushResult]]) -> None:
    table = Table("push", "sent MB", "read MB", "s", "load s", "swap s", "pause s", "canary s", title="Medians")
    pushes_s, reads = {}, {}
    for way, updates in measured.items():
        first: list[ReplicaUpdate] = [update.replicas[0] for update in updates]
        pushes_s[way] = median(update.push_s for update in updates)
        reads[way] = median(replica.read_bytes for replica in first)
        seconds = [pushes_s[way]] + [
            median(getattr(replica, name) for replica in first) for name in ("load_s", "swap_s", "pause_s", "canary_s")
        ]
        sent = median(update.sent_bytes for update in updates)
        table.add_row(way, f"{sent / MB:.1f}", f"{reads[way] / MB:.1f}", *(f"{value:.3f}" for value in seconds))
    console.print(table)
    delta, full = "what changed", "all weights"
    ratios = {
        "bytes": round(reads[delta] / reads[full], 3),
        "seconds": round(pushes_s[delta] / pushes_s[full], 3),
    }
    typer.echo(json.dumps({"delta_over_full": ratios, "push_s": {way: round(s, 3) for way, s in pushes_s.items()}}))


if __name__ == "__main__":
    typer.run(main)
