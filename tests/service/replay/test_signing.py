"""Signatures of results: whatever of what is signed changes is noticed; how a file keeps a result changes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_client import RolloutResponse, read_rollouts
from rollout_client.contract.rollouts import PolicyVersions, SampleResult
from service.replay.signing import ResultSigner, SecretNotReadable, signature_verdict
from service.rollout_requests.result_encoding import json_of
from tests.service.replay.seeded_engine import SeededGenerator
from tests.service.replay.test_replayer import SEEDED, played, record_of
from tests.service.rollouts.playing import play
from tests.service.scripted import EpisodeRecipe, ScriptedEnvironment, outcome

SIGNER = ResultSigner(b"k" * 32)


def signed() -> SampleResult:
    result = played(turns=2)
    SIGNER.sign(result)
    return result


def test_a_result_is_signed_as_it_ends_and_known_as_a_caller_has_it() -> None:
    recipe = EpisodeRecipe(sampling=SEEDED, max_rollout_turns=2)
    ended = play(recipe, SeededGenerator(), ScriptedEnvironment([outcome("O")]))
    SIGNER.sign(ended)
    got = SampleResult.model_validate_json(json_of(ended))
    assert signature_verdict(got, SIGNER) == "signed"


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_file_of_rollouts_keeps_the_signature_and_what_a_replay_needs(ending: str, tmp_path: Path) -> None:
    result, path = signed(), tmp_path / f"rollouts{ending}"
    policy = PolicyVersions(oldest="0", newest="0", current="0")
    RolloutResponse(request_id="r", metrics={}, policy=policy, samples=[result]).save(path)
    [kept] = read_rollouts(path)
    assert (kept.replay, kept.rollout_id) == (result.replay, result.rollout_id)
    assert signature_verdict(kept, SIGNER) == "signed"


def other_token(result: SampleResult) -> None:
    result.message_log[1].token_ids[0] += 1


def other_prompt(result: SampleResult) -> None:
    result.message_log[0].token_ids[0] += 1


def other_logprob(result: SampleResult) -> None:
    logprobs = result.message_log[1].generation_logprobs
    assert logprobs is not None
    logprobs[0] -= 1e-4


def other_version(result: SampleResult) -> None:
    spans = result.message_log[1].weight_versions
    assert spans is not None
    spans[0].version = "1"


def other_end(result: SampleResult) -> None:
    result.message_log[1].finish_reason = None


def other_seed(result: SampleResult) -> None:
    record_of(result).seed = 8


def other_place(result: SampleResult) -> None:
    record_of(result).generations[0].replica = "b"


def other_name(result: SampleResult) -> None:
    result.rollout_id = "another"


def moved_message(result: SampleResult) -> None:
    """The same ids in all, divided in another way."""
    first, second = result.message_log[1:3]
    second.token_ids.insert(0, first.token_ids.pop())


@pytest.mark.parametrize(
    "change",
    [
        other_token,
        other_prompt,
        other_logprob,
        other_version,
        other_end,
        other_seed,
        other_place,
        other_name,
        moved_message,
    ],
)
def test_a_change_of_what_is_signed_does_not_match(change: Callable[[SampleResult], None]) -> None:
    result = signed()
    assert signature_verdict(result, SIGNER) == "signed"
    change(result)
    assert signature_verdict(result, SIGNER) == "does_not_match"


def test_another_secret_does_not_match_and_none_says_nothing() -> None:
    result = signed()
    assert signature_verdict(result, ResultSigner(b"l" * 32)) == "does_not_match"
    assert signature_verdict(result, None) == "not_checked"
    assert signature_verdict(played(), SIGNER) == "not_signed"


def test_a_secret_is_read_from_its_file_or_the_service_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"k" * 32 + b"\n")
    assert signature_verdict(signed(), ResultSigner.of_file(path)) == "signed"
    path.write_bytes(b"k" * 31)
    with pytest.raises(SecretNotReadable, match="has 31 bytes; write at least 32"):
        ResultSigner.of_file(path)
    with pytest.raises(SecretNotReadable, match="No such file"):
        ResultSigner.of_file(tmp_path / "none")
