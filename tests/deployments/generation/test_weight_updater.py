"""The calls to the engine that change its weights: their order, the pause, and what a failure leaves."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.generation.adapters import Adapters
from deployments.generation.weight_updater import WeightsFailed, WeightUpdater
from deployments.policy.commands import CommandCosts, LoadedWeights, SwapOptions
from rollout_client.contract.policy import PauseMode
from tests.fakes.async_llm import ScriptedLLM, adapter_folder
from tests.virtual_time import now, run, runs, settled

# Importing vLLM takes seconds.
pytestmark = pytest.mark.slow
WEIGHTS = Path("/folder/model.safetensors")
STAGED = [(True, None), (True, None)]


def updater_of(llm: Any) -> WeightUpdater:
    return WeightUpdater(llm, Adapters(llm))


async def staged(llm: Any) -> WeightUpdater:
    """An updater that has staged version 3 and made no other call."""
    updater = updater_of(llm)
    await updater.stage(3, WEIGHTS)
    llm.calls.clear()
    return updater


def full_weights(workers: int = 1, times: int = 1, **further: Any) -> ScriptedLLM:
    """An engine that takes full weights so many times."""
    answers: dict[str, Any] = {"begin_staging": None, "staged": (True, None), "swap_staged": (0.5, None)}
    return ScriptedLLM(**{method: [[one] * workers] * times for method, one in answers.items()} | further)


def states_at_swaps(updater: WeightUpdater, llm: ScriptedLLM) -> list[tuple[bool, int, int]]:
    """Whether generations may begin, and how many aborts and swaps there were, when workers swap."""
    states = []

    def note(method: str) -> None:
        if method == "swap_staged":
            states.append((updater.may_generate.is_set(), updater.aborts, updater.swaps))

    llm.meanwhile = note
    return states


MET = [(True, None), (True, None)]
INIT_INFO = {"rank_offset": 1}


def test_a_trainer_is_met_when_every_worker_is_connected_without_a_pause() -> None:
    llm = ScriptedLLM(
        begin_rendezvous=[[(None, None)] * 2],
        rendezvous_state=[[(False, None), (True, None)], MET],
        end_rendezvous=[[None, None]],
    )
    run(updater_of(llm).init_transfer(INIT_INFO, 30.0))
    begun = "begin_rendezvous {'rank_offset': 1}"
    assert llm.calls == [begun, "rendezvous_state", "rendezvous_state", "end_rendezvous True"]


OTHER = [[(True, None), (False, "ValueError: other backend")]]
NOBODY = "nobody listens at 10.0.0.4:29500"


@pytest.mark.parametrize(
    ("results", "waits_for", "says"),
    [
        ({"begin_rendezvous": OTHER}, None, "Worker 1: ValueError: other backend"),
        ({"rendezvous_state": OTHER}, None, "Worker 1: ValueError: other backend"),
        ({"rendezvous_state": [[(False, None), (True, None)]] * 100}, NOBODY, f"0.2 s were not enough: {NOBODY}"),
    ],
)
@runs
async def test_one_worker_that_cannot_connect_makes_all_give_up_without_a_pause(
    results: dict[str, Any], waits_for: str | None, says: str
) -> None:
    met: dict[str, Any] = {"begin_rendezvous": [[(None, None)] * 2], "rendezvous_state": [MET]}
    llm = ScriptedLLM(**met | results, end_rendezvous=[[waits_for, None]])
    with pytest.raises(WeightsFailed) as failed:
        await updater_of(llm).init_transfer(INIT_INFO, 0.2)
    assert (str(failed.value), llm.calls[-1]) == (says, "end_rendezvous False")
    assert "pause" not in " ".join(llm.calls)


def test_staging_returns_when_every_worker_has_read_the_file() -> None:
    llm = full_weights(2, staged=[[(False, None), (True, None)], STAGED])
    run(updater_of(llm).stage(1, WEIGHTS))
    assert llm.calls == ["begin_staging /folder/model.safetensors", "staged", "staged"]


async def test_a_file_that_a_worker_cannot_read_is_not_staged() -> None:
    updater = updater_of(full_weights(2, staged=[[(False, None), (False, "OSError: gone")]]))
    with pytest.raises(WeightsFailed, match="Worker 1: OSError: gone"):
        await updater.stage(1, WEIGHTS)
    with pytest.raises(RuntimeError, match="Nothing is staged"):
        await updater.swap(SwapOptions())


async def test_a_hold_pauses_until_it_is_released_and_a_release_alone_does_nothing() -> None:
    llm = ScriptedLLM()
    updater = updater_of(llm)
    await updater.release()
    await updater.hold("wait", 20.0)
    assert (llm.calls, updater.is_held, updater.is_paused) == (["pause mode=wait clear_cache=False"], True, False)
    await updater.release()
    await asyncio.sleep(30.0)
    assert (llm.calls[1:], updater.is_held) == (["resume"], False)


async def test_a_hold_that_nobody_ends_ends_with_the_lease_of_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    llm = ScriptedLLM()
    updater = updater_of(llm)
    await updater.hold("keep", 20.0)
    await asyncio.sleep(15.0)
    await updater.hold("abort", 20.0)
    await asyncio.sleep(19.9)
    assert (updater.is_held, updater.aborts, "resume" in llm.calls) == (True, 1, False)
    await asyncio.sleep(0.2)
    assert (updater.is_held, llm.calls[-1]) == (False, "resume")
    assert caplog.messages == ["Generations go on: nobody has ended the pause within its lease."]


async def test_a_hold_whose_generations_do_not_end_in_its_lease_fails_and_generations_go_on() -> None:
    llm = ScriptedLLM()
    updater = updater_of(llm)
    llm.engine_core.pause_s = 30.0
    with pytest.raises(WeightsFailed, match="generations had not ended after 20 s"):
        await updater.hold("wait", 20.0)
    assert (now(), updater.is_held, llm.calls[-1]) == (20.0, False, "resume")


async def test_new_weights_end_a_hold_without_a_generation_in_between() -> None:
    llm = full_weights()
    updater = await staged(llm)
    await updater.hold("keep", 20.0)
    llm.calls.clear()
    await updater.swap(SwapOptions())
    assert [call.split()[0] for call in llm.calls] == ["pause", "swap_staged", "label", "resume"]
    await asyncio.sleep(30.0)
    assert (updater.is_held, llm.calls.count("resume")) == (False, 1)


async def test_an_engine_that_waits_for_weights_is_neither_held_nor_released() -> None:
    llm = ScriptedLLM(begin_saving=[[None]])
    updater = updater_of(llm)
    await updater.start_transfer(SwapOptions(), WEIGHTS)
    with pytest.raises(WeightsFailed, match="an update that did not end"):
        await updater.hold("keep", 20.0)
    await updater.release()
    assert (updater.is_paused, "resume" in llm.calls) == (True, False)


async def test_a_swap_pauses_then_sends_swap_label_and_resume_in_this_order() -> None:
    llm = full_weights(2, swap_staged=[[(0.25, None), (0.5, None)]])
    updater = await staged(llm)
    in_the_pause = states_at_swaps(updater, llm)
    costs = await updater.swap(SwapOptions("wait", reset_prefix_cache=False))
    assert llm.calls == ["pause mode=wait clear_cache=False", "reset_encoder_cache", "swap_staged", "label 3", "resume"]
    assert in_the_pause == [(True, 0, 0)], "new generations need not wait"
    assert costs.swap_s == 0.5, "of the slowest worker"
    assert updater.loaded == LoadedWeights(3)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_in_a_trial_generations_wait_until_the_weights_are_accepted(mode: PauseMode) -> None:
    llm = full_weights()
    updater = await staged(llm)
    await updater.swap(SwapOptions(mode), is_trial=True)
    paused, *calls = llm.calls
    assert paused == f"pause mode={mode} clear_cache=True"
    assert calls == ["swap_staged", "label 3", "pause mode=abort clear_cache=False", "resume"]
    assert (updater.may_generate.is_set(), updater.is_on_trial, updater.aborts) == (False, True, 1)
    updater.accept()
    assert (updater.may_generate.is_set(), updater.is_on_trial) == (True, False)


def connector(name: str, **extra: Any) -> Any:
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)


@pytest.mark.parametrize(("resets", "mode"), [(True, "abort"), (False, "keep")])
async def test_a_cache_in_host_memory_is_reset_without_frozen_generations(resets: bool, mode: PauseMode) -> None:
    llm = full_weights()
    llm.vllm_config.kv_transfer_config = connector("OffloadingConnector")
    updater = await staged(llm)
    await updater.swap(SwapOptions("keep", resets))
    assert f"pause mode={mode} clear_cache={resets}" in llm.calls
    assert updater.aborts == resets


@pytest.mark.parametrize(
    "kept", [connector("NixlConnector"), connector("OffloadingConnector", secondary_tiers=[{"type": "fs"}])]
)
async def test_no_weights_are_taken_where_blocks_of_older_ones_would_stay(kept: Any) -> None:
    llm = full_weights()
    llm.vllm_config.kv_transfer_config = kept
    says = rf"^engine\.kv_transfer_config: {kept.kv_connector} may keep blocks of older weights"
    with pytest.raises(WeightsFailed, match=says):
        await updater_of(llm).stage(3, WEIGHTS)
    with pytest.raises(WeightsFailed, match=says):
        await updater_of(llm).init_transfer(INIT_INFO, 30.0)
    assert llm.calls == []


async def test_a_swap_that_is_no_trial_ends_one() -> None:
    updater = updater_of(full_weights(times=2))
    for version, is_trial in ((3, True), (2, False)):
        await updater.stage(version, WEIGHTS)
        await updater.swap(SwapOptions(), is_trial)
    assert (updater.may_generate.is_set(), updater.is_on_trial, updater.loaded) == (True, False, LoadedWeights(2))


async def test_a_failed_swap_names_the_worker_and_leaves_the_version_as_it_was() -> None:
    llm = full_weights(swap_staged=[[(0.0, "ValueError: other shape")]])
    updater = await staged(llm)
    with pytest.raises(WeightsFailed, match="Worker 0: ValueError: other shape"):
        await updater.swap(SwapOptions())
    assert updater.is_paused
    assert "resume" not in llm.calls, "its weights may be a mixture"
    assert updater.loaded == LoadedWeights(0)


async def test_a_switch_of_adapter_pauses_nothing() -> None:
    llm = ScriptedLLM()
    updater = updater_of(llm)
    folder = adapter_folder("4")
    await updater.stage_adapter(4, folder)
    times = await updater.swap(SwapOptions("abort"), is_trial=True)
    assert (updater.may_generate.is_set(), updater.aborts) == (False, 0)
    updater.accept()
    assert updater.may_generate.is_set()
    assert (times, updater.loaded) == (CommandCosts(), LoadedWeights(0, adapter=4))
    assert llm.calls == [f"add_lora 1 {folder}"]


async def test_a_transfer_that_broke_off_ends_when_full_weights_are_swapped_in() -> None:
    silent = "the trainer sent nothing for 20 s"
    answers: dict[str, Any] = {
        "receive_transfer": [[(None, silent), (None, None)]],
        "abandon_transfer": [[(None, None)] * 2],
    }
    llm = full_weights(2, begin_saving=[[None, None]], **answers)
    updater = updater_of(llm)
    await updater.start_transfer(SwapOptions(), WEIGHTS)
    with pytest.raises(WeightsFailed, match=f"^Worker 0: {silent}$"):
        await updater.update_transfer({"names": []}, 20.0)
    await updater.abandon_transfer()
    assert updater.is_paused
    await updater.stage_adapter(4, adapter_folder("4"))
    with pytest.raises(RuntimeError, match="full weights have to be loaded before an adapter"):
        await updater.swap(SwapOptions())
    await updater.stage(3, WEIGHTS)
    await updater.swap(SwapOptions())
    assert (updater.is_paused, updater.loaded) == (False, LoadedWeights(3))
    await updater.stage_adapter(4, adapter_folder("4"))
    await updater.swap(SwapOptions())
    assert updater.loaded == LoadedWeights(3, adapter=4)
    calls = ["start_weight_update", "receive_transfer {'names': []} 20.0", "abandon_transfer"]
    assert llm.calls[2:5] == calls


async def test_what_one_worker_has_saved_is_told_once_it_is_written() -> None:
    llm = ScriptedLLM(begin_saving=[[None, None]], saved_weights=[[None, (None, None)], [None, (("5f3a", 10), None)]])
    updater = updater_of(llm)
    await updater.start_transfer(SwapOptions(), Path("/node/transfer.safetensors"), b"header")
    assert await updater.saved_transfer() == ("5f3a", 10)
    begun = "begin_saving /node/transfer.safetensors b'header'"
    assert llm.calls[:2] == [begun, "pause mode=keep clear_cache=True"]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([None, (None, "OSError: no space left")], "OSError: no space left"),
        ([None, None], "the transfer was begun without a file"),
    ],
)
async def test_weights_that_no_worker_could_save_say_why(answers: list[Any], error: str) -> None:
    with pytest.raises(WeightsFailed, match=f"^{error}$"):
        await updater_of(ScriptedLLM(saved_weights=[answers])).saved_transfer()


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(
    ("asked", "paused", "is_trial", "aborts"),
    [("keep", "abort", False, 1), ("wait", "wait", False, 0), ("keep", "abort", True, 1), ("wait", "wait", True, 1)],
)
async def test_while_full_weights_change_no_generation_of_an_adapter_goes_on(
    is_named: bool, asked: PauseMode, paused: str, is_trial: bool, aborts: int
) -> None:
    llm: Any = full_weights()
    adapters = Adapters(llm)
    updater = WeightUpdater(llm, adapters)
    if is_named:
        used = await adapters.load("run-b/7", 7, adapter_folder("used"))
        adapters.hold(used)
        adapters.serve({"run-b": used})
    else:
        await updater.stage_adapter(4, adapter_folder("used"))
        await updater.swap(SwapOptions())
        assert adapters.current is not None
        used = adapters.current
    await updater.stage(5, WEIGHTS)
    llm.calls.clear()
    in_the_pause = states_at_swaps(updater, llm)
    with adapters.used_by_generation(used), adapters.used_by_generation(None):
        await updater.swap(SwapOptions(asked), is_trial)
        assert (llm.calls[0], in_the_pause) == (f"pause mode={paused} clear_cache=True", [(False, aborts, 0)])
        assert (adapters.versions, updater.swaps, updater.loaded) == ({}, 1, LoadedWeights(5))
        assert (adapters.needed, updater.may_generate.is_set()) == ({"used"}, not is_trial), "a generation still has it"
    llm.may_unload.set()
    await settled()
    assert (adapters.needed, llm.unloaded) == (set(), [1])


def test_a_checksum_is_that_of_one_worker_or_of_all_checksums() -> None:
    of_one = run(updater_of(ScriptedLLM(checksum_weights=[[None], ["ab"]])).checksum())
    of_two = run(updater_of(ScriptedLLM(checksum_weights=[["ab", None], ["ab", "cd"]])).checksum())
    sha256_of_abcd = "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589"
    assert (of_one, of_two) == ("ab", sha256_of_abcd)
