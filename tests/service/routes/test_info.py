"""`GET /info` says what the service is, and every response names the version of the contract."""

from importlib.metadata import version
from typing import Any

from transformers import AutoTokenizer

from deployments.rollout_records.book import RolloutRecordsSettings
from deployments.rollout_records.store import RolloutRecordStore
from rollout_client.tokenizer_check import tokenizer_info, tokens_by_id
from rollout_client.version import CONTRACT_VERSION
from service.rollout_records.recorder import RolloutRecorder
from service.settings import AdmissionSettings, RequestLimits
from tests.paths import TINY_MODEL
from tests.service.scripted_http import DESCRIPTION, MAX_MODEL_LEN, VOCAB_SIZE, ScriptedHttp

tokenizer: Any = AutoTokenizer.from_pretrained(TINY_MODEL)
DESCRIBED = (
    *("max_num_seqs", "kv_cache_size_tokens", "kv_block_tokens", "max_loras", "max_lora_rank", "max_logprobs"),
    *("returns_experts", "takes_images", "is_batch_invariant", "drafts"),
)


def test_info_has_model_tokenizer_limits_versions_and_tasks() -> None:
    limits, admission = RequestLimits(max_body_bytes=7), AdmissionSettings(max_rollouts=5)
    response = ScriptedHttp(limits, admission=admission).request("GET", "/v1/info")
    assert response.status_code == 200
    assert response.json() == {
        "model": {"name": "tiny", "revision": None, "vocab_size": VOCAB_SIZE, "max_model_len": MAX_MODEL_LEN},
        "tokenizer": tokenizer_info(tokenizer).model_dump(),
        "limits": {
            "max_seq_len": MAX_MODEL_LEN,
            **{name: getattr(DESCRIPTION, name) for name in DESCRIBED},
            **limits.model_dump(),
            "admission": admission.model_dump(),
        },
        "versions": {
            "service": version("rollout-service"),
            "contract": CONTRACT_VERSION,
            "engine": "",
            "ray": version("ray"),
            "transformers": version("transformers"),
        },
        "policy_version": None,
        "tasks": ["math", "sliding_puzzle"],
        "follow": None,
        "keeps_records": False,
    }


def test_info_says_whether_trainers_can_report() -> None:
    store: Any = RolloutRecordStore(RolloutRecordsSettings())
    assert ScriptedHttp(recorder=RolloutRecorder(store)).request("GET", "/v1/info").json()["keeps_records"] is True


def test_the_vocabulary_is_listed_by_id() -> None:
    response = ScriptedHttp().request("GET", "/v1/info/vocabulary")
    assert (response.status_code, response.json()) == (200, {"tokens": tokens_by_id(tokenizer)})


def test_every_response_names_the_version_of_the_contract() -> None:
    service = ScriptedHttp()
    for response in (service.request("GET", "/healthz"), service.request("GET", "/nowhere"), service.post(b"{")):
        assert response.headers["x-rollout-contract"] == CONTRACT_VERSION
