"""Pushing weights to a scripted policy over real sockets: what is sent, and what a break costs."""

import json
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from tenacity import wait_none

from rollout_client import AsyncRolloutClient, RequestRejected, RolloutTimeout, ServiceUnreachable
from rollout_client.contract.policy import NamedPolicyState, PushResult
from rollout_client.weights.file_tensors import RankTooHigh
from rollout_client.weights.safetensors_file import NotSafetensors, parse_header
from rollout_client.weights.sources import full_weights
from tests.clients.scripted_policy import CUT, CUT_AFTER, DAMAGED, FORGET, ScriptedPolicy, digest_of, layout_of, serving
from tests.virtual_time import runs

LAYOUT = {"embed.weight": ("BF16", [4, 3]), "norm.weight": ("BF16", [3])}


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedPolicy]:
    monkeypatch.setattr("rollout_client.retry.BACKOFF", wait_none())
    with serving(ScriptedPolicy(layout=dict(LAYOUT))) as served:
        yield served


@runs
async def call(url: str, method: str, *arguments: Any, client: dict[str, Any] | None = None, **options: Any) -> Any:
    """Through the half of the client that is written by hand; the other one is generated from it."""
    async with AsyncRolloutClient(url, **(client or {})) as rollout_client:
        return await attrgetter(method)(rollout_client)(*arguments, **options)


def push(policy: ScriptedPolicy, source: Any, *arguments: Any, **options: Any) -> Any:
    return call(policy.url, "push_weights", source, *arguments, **options)


def bf16_state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, (_, shape) in LAYOUT.items()}


def arrived(policy: ScriptedPolicy, version: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load(policy.content(version))
    return tensors


def same(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def metadata_of(content: bytes) -> Mapping[str, str]:
    return parse_header(content[8 : 8 + int.from_bytes(content[:8], "little")]).metadata


def saved_adapter(folder: Path, config: str = '{"r": 2}') -> Path:
    save_file({"lora_A.weight": torch.ones(2, 3)}, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(config)
    return folder


# What is sent


def test_chunks_of_weights_name_their_place_and_the_last_one_the_digest(policy: ScriptedPolicy) -> None:
    state = bf16_state()
    update = push(policy, state, 7, chunk_bytes=80)
    assert update == PushResult(version=7, checksum=None, replicas=[], sent_bytes=206, push_s=update.push_s)
    assert update.push_s > 0
    content = policy.versions[7]
    assert policy.ranges == ["bytes 0-79/206", "bytes 80-159/206", "bytes 160-205/206"]
    assert [put.headers.get("weights-digest") for put in policy.puts] == [None, None, digest_of(content)]
    assert not any("content-digest" in put.headers for put in policy.puts)
    assert {put.headers["content-type"] for put in policy.puts} == {"application/vnd.safetensors"}
    assert not any("content-encoding" in put.headers for put in policy.puts)
    assert [put.query for put in policy.puts] == [{"kind": "full"}] * 3
    assert same(arrived(policy, 7), state)


def test_options_that_are_given_stand_in_the_query(policy: ScriptedPolicy) -> None:
    push(policy, bf16_state(), 1, mode="wait", reset_prefix_cache=False, if_busy="refuse")
    [put] = policy.puts
    assert put.query == {"kind": "full", "mode": "wait", "reset_prefix_cache": "false", "if_busy": "refuse"}
    assert put.headers["content-range"] == "bytes 0-205/206"


def test_a_version_that_is_not_given_is_one_more_than_the_newest(policy: ScriptedPolicy) -> None:
    policy.versions[4] = b""
    assert push(policy, bf16_state()).version == 5


def test_partial_weights_may_name_the_version_that_has_the_others(policy: ScriptedPolicy, tmp_path: Path) -> None:
    state = {"norm.weight": torch.zeros(3)}
    save_file(state, tmp_path / "norm.safetensors")
    push(policy, tmp_path / "norm.safetensors", kind="partial", base=0)
    assert same(arrived(policy, 1), {"norm.weight": state["norm.weight"].bfloat16()})
    assert policy.puts[0].query == {"kind": "partial", "base": "0"}


def test_a_folder_is_uploaded_as_its_index_says_and_cast(policy: ScriptedPolicy, tmp_path: Path) -> None:
    state = bf16_state()
    files = {"norm.weight": "a.safetensors", "embed.weight": "b.safetensors"}
    for name, file in files.items():
        save_file({name: state[name].float()}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"norm.weight": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    push(policy, str(tmp_path))
    assert same(arrived(policy, 1), state)


def test_an_adapter_is_sent_with_its_config_in_the_metadata(policy: ScriptedPolicy, tmp_path: Path) -> None:
    push(policy, saved_adapter(tmp_path, '{"r": 2}\n'), kind="adapter")
    assert metadata_of(policy.content(1)) == {"format": "pt", "adapter_config": '{"r": 2}\n'}
    assert same(arrived(policy, 1), {"lora_A.weight": torch.ones(2, 3)})
    assert policy.puts[0].query == {"kind": "adapter"}


def named_state(name: str, current: int | None = 4, updating_to: int | None = None) -> NamedPolicyState:
    return NamedPolicyState(name=name, current=current, next_version=5, updating_to=updating_to)


@pytest.mark.parametrize(("name", "version"), [("run-b", 5), ("run-c", 1)])
def test_an_adapter_of_a_named_policy_gets_the_next_number_of_that_name(
    policy: ScriptedPolicy, tmp_path: Path, name: str, version: int
) -> None:
    policy.named = [named_state("run-b")]
    assert push(policy, saved_adapter(tmp_path), kind="adapter", name=name).version == version
    assert policy.puts[0].query == {"kind": "adapter", "name": name}


def test_what_may_be_wrong_with_a_version_is_in_the_answer_and_in_the_log(
    policy: ScriptedPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy.base, policy.warnings = 3, ["The adapter is served on other weights."]
    update = push(policy, saved_adapter(tmp_path), kind="adapter")
    assert (update.base, update.warnings) == (3, policy.warnings)
    assert [record.getMessage() for record in caplog.records if record.name == "rollout_client"] == [
        "Version 1: The adapter is served on other weights."
    ]


def test_what_has_arrived_is_looked_up_under_the_name(policy: ScriptedPolicy, tmp_path: Path) -> None:
    policy.named = [named_state("run-b")]
    policy.script.append(CUT)
    push(policy, saved_adapter(tmp_path), kind="adapter", name="run-b")
    assert "/policy/versions/5/upload?name=run-b" in policy.asked


def test_a_module_of_peft_is_pushed_as_peft_saves_its_active_adapter(policy: ScriptedPolicy) -> None:
    push(policy, PeftLikeModule("default"), kind="adapter")
    push(policy, PeftLikeModule("other"), kind="adapter")
    for version, name in ((1, "default"), (2, "other")):
        assert json.loads(metadata_of(policy.content(version))["adapter_config"]) == {"r": 2, "name": name}
        assert same(arrived(policy, version), {"lora_A.weight": torch.ones(2, 3)})


class PeftLikeModule:
    """The attributes of PEFT's modules, and how they save their adapters."""

    def __init__(self, *active: str) -> None:
        self.active_adapter = active[0] if len(active) == 1 else [*active]
        self.peft_config: dict[str, object] = {}

    def save_pretrained(self, folder: str, selected_adapters: list[str]) -> None:
        for name in selected_adapters:
            place = Path(folder) if name == "default" else Path(folder, name)
            place.mkdir(exist_ok=True)
            save_file({"lora_A.weight": torch.ones(2, 3)}, place / "adapter_model.safetensors", {"format": "pt"})
            (place / "adapter_config.json").write_text(json.dumps({"r": 2, "name": name}))


def test_a_named_policy_is_dropped_by_its_name(policy: ScriptedPolicy) -> None:
    call(policy.url, "policy.drop", "run-b")
    assert policy.dropped == ["/policy/names/run-b"]


def test_a_delta_is_one_zstd_stream_whose_size_its_last_chunk_says(policy: ScriptedPolicy, tmp_path: Path) -> None:
    parts = {"norm.weight.gaps": torch.tensor([1], dtype=torch.int32), "norm.weight.values": torch.ones(1).bfloat16()}
    save_file(parts, tmp_path / "delta.safetensors")
    source, checksum = tmp_path / "delta.safetensors", "c" * 64
    options = {"kind": "delta", "base": 0, "checksum": checksum, "chunk_bytes": 50}
    update = push(policy, source, **options)
    total = len(policy.versions[1])
    assert policy.ranges[:2] == ["bytes 0-49/*", "bytes 50-99/*"]
    assert policy.ranges[-1] == f"bytes {(total - 1) // 50 * 50}-{total - 1}/{total}"
    assert {put.headers["content-encoding"] for put in policy.puts} == {"zstd"}
    assert policy.puts[0].query == {"kind": "delta", "base": "0", "checksum": checksum}
    assert update.sent_bytes == total
    assert same(arrived(policy, 1), parts)


def test_a_checkpoint_that_the_service_fetches_is_named(policy: ScriptedPolicy) -> None:
    assert call(policy.url, "load_checkpoint", "s3://bucket/step-8", mode="abort").version == 1
    [put] = policy.puts
    assert (json.loads(put.body), put.query) == (
        {"checkpoint": "s3://bucket/step-8"},
        {"kind": "full", "mode": "abort"},
    )
    assert put.headers["content-type"] == "application/json"


def test_a_checkpoint_is_retried_only_where_the_service_has_not_begun(policy: ScriptedPolicy) -> None:
    policy.script += [(503, {}), None, CUT]
    assert call(policy.url, "load_checkpoint", "/weights").version == 1
    assert len(policy.puts) == 2
    with pytest.raises(ServiceUnreachable):
        call(policy.url, "load_checkpoint", "/weights")
    assert len(policy.puts) == 3


def test_a_rollback_names_the_version_and_perhaps_a_number(policy: ScriptedPolicy) -> None:
    assert call(policy.url, "policy.rollback", 0).version == 1
    assert call(policy.url, "policy.rollback", to=0, version=7, mode="abort", timeout_s=20.0).version == 7
    assert policy.rollbacks == [({}, {"to": 0}), ({"mode": "abort"}, {"to": 0, "version": 7})]


def test_the_progress_bar_counts_bytes(policy: ScriptedPolicy, capsys: pytest.CaptureFixture[str]) -> None:
    push(policy, bf16_state(), chunk_bytes=100, progress=True)
    assert "206/206 bytes" in capsys.readouterr().err


# What is refused before anything is sent


def test_an_adapter_of_a_rank_that_the_engines_do_not_take_is_not_sent(policy: ScriptedPolicy, tmp_path: Path) -> None:
    policy.max_lora_rank = 8
    with pytest.raises(RankTooHigh, match="its rank is 16, and the engines take at most 8"):
        push(policy, saved_adapter(tmp_path, '{"r": 16}'), kind="adapter", name="run-b")
    assert policy.puts == []


def test_an_index_without_a_map_of_names_is_refused(policy: ScriptedPolicy, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(NotSafetensors, match="has no weight_map of names to files"):
        push(policy, tmp_path)


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        ({}, {"kind": "delta", "base": 0}, "delta weights come from a path, not from dict; see PolicyPusher"),
        ({}, {"kind": "adapter"}, "adapter weights come from a path"),
        (
            PeftLikeModule("a", "b"),
            {"kind": "adapter"},
            r"The adapters a, b are active: set_adapter\(\) chooses the one to be sent",
        ),
        ({}, {"kind": "delta"}, "kind='delta' and base=None: a delta needs the version that it changes"),
        ({}, {"base": 3}, "kind='full' and base=3: a delta needs"),
        ({}, {"mode": "gently"}, "mode"),
        (bf16_state(), {"chunk_bytes": 0}, "chunk_bytes=0: a chunk needs at least one byte"),
        ({"embed.weight": torch.ones(4, 3)}, {}, r"nothing was sent\. Missing: norm\.weight\.$"),
        ({"other": torch.ones(1)}, {"kind": "partial"}, "Not known there: other"),
        ({}, {"kind": "partial"}, "no tensor to send"),
    ],
)
def test_weights_and_arguments_that_do_not_fit_are_value_errors(
    policy: ScriptedPolicy, source: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        push(policy, source, **options)
    assert policy.puts == []


# What a disconnect costs


@pytest.mark.parametrize(
    ("script", "ranges"),
    [
        ([None, CUT], ["0-79", "80-159", "80-159", "160-205"]),
        ([None, CUT_AFTER], ["0-79", "80-159", "160-205"]),
        ([None, (503, {})], ["0-79", "80-159", "80-159", "160-205"]),
        ([None, None, CUT_AFTER], ["0-79", "80-159", "160-205", "160-205"]),
        ([None, FORGET], ["0-79", "80-159", "0-79", "80-159", "160-205"]),
    ],
    ids=str,
)
def test_a_disconnect_resends_at_most_one_chunk(policy: ScriptedPolicy, script: list[Any], ranges: list[str]) -> None:
    policy.script += script
    state = bf16_state()
    update = push(policy, state, chunk_bytes=80)
    assert policy.ranges == [f"bytes {span}/206" for span in ranges]
    assert (update.version, update.sent_bytes) == (1, sum(len(put.body) for put in policy.puts))
    assert same(arrived(policy, 1), state)


def test_weights_that_were_damaged_on_their_way_are_sent_again_as_a_whole(policy: ScriptedPolicy) -> None:
    policy.script += [None, None, DAMAGED]
    state = bf16_state()
    push(policy, state, chunk_bytes=80)
    assert policy.ranges == [f"bytes {span}/206" for span in ("0-79", "80-159", "160-205")] * 2
    assert same(arrived(policy, 1), state)
    assert [put.headers.get("weights-digest") for put in policy.puts] == [None, None, digest_of(policy.versions[1])] * 2


def test_a_push_broken_off_late_awaits_its_answer(policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_client.calls.async_client.weights.POLL_S", 0.01)
    policy.script += [None, None, CUT_AFTER]
    policy.updating += [1, 1, 1]
    assert push(policy, bf16_state(), 1, chunk_bytes=80).version == 1
    assert policy.ranges == [f"bytes {span}/206" for span in ("0-79", "80-159", "160-205", "160-205")]
    assert policy.asked == ["/policy/layout"] + ["/policy"] * 4


def test_what_arrived_of_a_chunk_is_not_sent_again(policy: ScriptedPolicy) -> None:
    content = b"".join(bytes(block) for block in full_weights(bf16_state(), layout_of(LAYOUT)).blocks())
    policy.uploads[1] = content[:100]
    policy.script += [(503, {})]
    push(policy, bf16_state(), 1, chunk_bytes=206)
    assert policy.ranges == ["bytes 0-205/206", "bytes 100-205/206"]
    assert policy.puts[1].headers["weights-digest"] == digest_of(content)


def test_a_refusal_ends_the_push(policy: ScriptedPolicy) -> None:
    policy.script += [None, (409, {"type": "urn:rollout:problem:version-refused", "detail": "It is taken."})]
    with pytest.raises(RequestRejected, match=r"^Scripted \(409\): It is taken\.$"):
        push(policy, bf16_state(), chunk_bytes=80)
    assert len(policy.puts) == 2


def test_disconnects_without_end_end_after_the_retries(policy: ScriptedPolicy) -> None:
    policy.script += [None] + [CUT] * 9
    with pytest.raises(ServiceUnreachable):
        push(policy, bf16_state(), chunk_bytes=80, client={"retries": 2})
    assert len(policy.puts) == 4


# What is asked


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("timeout_s", [60, None])
def test_waiting_for_a_version_asks_until_it_is_current(policy: ScriptedPolicy, timeout_s: float | None) -> None:
    policy.polls += [2, 2, 3]
    assert call(policy.url, "policy.wait_for_version", 3, timeout_s=timeout_s).current == 3
    assert policy.asked == ["/policy?min_version=3&wait_s=20.0"] * 3


@pytest.mark.slow
def test_waiting_for_a_version_ends_at_its_timeout(policy: ScriptedPolicy) -> None:
    with pytest.raises(RolloutTimeout, match=r"^Version 3 was not current after 0\.5 s\. Check that it is pushed"):
        call(policy.url, "policy.wait_for_version", 3, timeout_s=0.5)
    waits_s = [float(question.removeprefix("/policy?min_version=3&wait_s=")) for question in policy.asked]
    assert waits_s[0] <= 0.5
    assert waits_s == sorted(set(waits_s), reverse=True)
