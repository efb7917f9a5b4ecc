"""A random model of the shape of Qwen2.5-0.5B behind the service, in bfloat16: log-probabilities and pushes."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.gpu_check.configs import Machine, running_service
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.random_model import SHAPE, SMALL_SHAPE, figures_of, write_model
from benchmarks.reference_model import State, differences, load, merged, model_of, perturbed, write_adapter
from rollout_client import PolicyPusher, RolloutClient, Sampling
from rollout_client.contract.policy import PauseMode
from rollout_client.contract.rollouts import SampleResult

MEAN_TOLERANCE = 0.05
RANK = 8
SAMPLES = 16
NEW_TOKENS = 96
LONG = 1500
CHANGED = 0.01
"""Share of the values of each tensor that a delta changes."""


def check(machine: Machine, findings: Findings) -> None:
    folder = machine.folder / "model"
    state = write_model(folder, SHAPE if machine.device == "gpu" else SMALL_SHAPE)
    options: dict[str, Any] = {"max_model_len": 2048, "enable_lora": True, "max_lora_rank": RANK}
    served = machine.served(machine.engine(folder, **options), policy={"checkpoint_roots": [str(machine.folder)]})
    with running_service(served, findings) as (_, client):
        check_logprobs(machine, client, findings, folder, state)
        check_deltas(client, findings, state)
        check_pauses(client, findings, state)
        with findings.attempt("an adapter"):
            check_adapter(machine, client, findings, folder, state)


def play(client: RolloutClient, count: int = SAMPLES, new_tokens: int = NEW_TOKENS) -> list[SampleResult]:
    sampling = Sampling(max_new_tokens=new_tokens, ignore_eos=True)
    return client.rollout(client.example_samples("math", count, seed=5), sampling=sampling).samples


def check_logprobs(machine: Machine, client: RolloutClient, findings: Findings, folder: Path, state: State) -> None:
    name = "log-probabilities against transformers"
    with findings.attempt(name):
        played = play(client)
        for dtype in (torch.bfloat16, torch.float32):
            model = model_of(folder, dtype=dtype).to(machine.torch_device)
            figures = figures_of(differences(played, {"0": model})["0"])
            findings.add(f"{name} in {dtype}", figures["mean"] <= MEAN_TOLERANCE, **figures)
    name = "log-probabilities after a push of all weights"
    with findings.attempt(name):
        other = perturbed(state, 1)
        pushed = client.push_weights(other)
        findings.add("a push of all weights", None, **costs(pushed))
        by_old, by_new = figures_by(machine, client, folder, other)
        held = by_new["mean"] <= MEAN_TOLERANCE < by_old["mean"]
        findings.add(name, held, **by_new, mean_by_old_weights=by_old["mean"])


def figures_by(
    machine: Machine, client: RolloutClient, folder: Path, changed: State
) -> tuple[dict[str, float], dict[str, float]]:
    """Differences of the service's log-probabilities from those by the model's own weights, and by the changed ones."""
    version = str(client.policy.state().current)
    model = model_of(folder).to(machine.torch_device)
    played = play(client)
    by_own = figures_of(differences(played, {version: model})[version])
    load(model, changed)
    return by_own, figures_of(differences(played, {version: model})[version])


def costs(pushed: Any) -> dict[str, Any]:
    replica = pushed.replicas[0]
    return {
        "push_s": round(pushed.push_s, 3),
        "status": replica.status,
        **{name: round(getattr(replica, name), 4) for name in ("load_s", "swap_s", "pause_s", "canary_s")},
        "sent_MB": round(pushed.sent_bytes / 1e6, 1),
    }


def check_deltas(client: RolloutClient, findings: Findings, state: State) -> None:
    name = "deltas leave the weights that they make"
    with findings.attempt(name):
        weights = {key: tensor.clone() for key, tensor in state.items()}
        pusher = PolicyPusher(client)
        first = pusher.push(weights)
        findings.add("a full push by a pusher", None, **costs(first))
        for number in range(2):
            change(weights)
            pushed = pusher.push(weights)
            findings.add(f"a delta of 1% ({number})", None, **costs(pushed))
        by_delta = engine_checksum(client)
        full = client.push_weights(weights)
        findings.add("a second full push", None, **costs(full))
        by_full = engine_checksum(client)
        findings.add(name, by_delta == by_full is not None, by_delta=by_delta, by_full=by_full)


def change(weights: State) -> None:
    """Changes the last bit of `CHANGED` of the values of each tensor."""
    for tensor in weights.values():
        bits = tensor.view(torch.int16).reshape(-1)
        count = max(round(CHANGED * bits.numel()), 1)
        bits[torch.randperm(bits.numel())[:count]] ^= 1


def engine_checksum(client: RolloutClient) -> str | None:
    [replica] = client.policy.state(checksums_within_s=60).replicas
    return replica.checksum


def check_pauses(client: RolloutClient, findings: Findings, state: State) -> None:
    others = [perturbed(state, seed) for seed in (2, 3)]
    for number, mode in enumerate(get_args(PauseMode)):
        name = f"new weights in mode {mode} while 64 rollouts generate"
        with findings.attempt(name), ThreadPoolExecutor(1) as thread:
            playing = thread.submit(play, client, 64, LONG)
            time.sleep(0.7)
            pushed = client.push_weights(others[number % 2], mode=mode)
            spoken = [one for sample in playing.result() for one in sample.message_log if one.role == "assistant"]
            spans = sorted({str([span.version for span in message.weight_versions or ()]) for message in spoken})
            complete = len(spoken) == 64 and all(len(message.token_ids) == LONG for message in spoken)
            changed = any(len(message.weight_versions or ()) > 1 for message in spoken)
            findings.add(name, complete and changed == (mode != "wait"), spans=spans, **costs(pushed))


def check_adapter(machine: Machine, client: RolloutClient, findings: Findings, folder: Path, state: State) -> None:
    client.push_weights(state)
    adapter = machine.folder / "adapter"
    added = write_adapter(adapter, state, ("q_proj", "v_proj", "down_proj"), seed=7, rank=RANK, scale=0.3)
    pushed = client.push_weights(adapter, kind="adapter")
    by_base, by_merged = figures_by(machine, client, folder, merged(state, added))
    held = by_merged["mean"] <= MEAN_TOLERANCE < by_base["mean"]
    findings.add("an adapter", held, **by_merged, mean_without=by_base["mean"], **costs(pushed))
