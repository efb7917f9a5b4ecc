"""The configs of the repository on a Hopper card, as far as that can be known without one."""

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml
from transformers import Qwen2Config

from service.startup.generated_config import ServedModel, generated_config
from tests.paths import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
LONGEST = 32768


def engine_of(config: dict[str, Any]) -> dict[str, Any]:
    engine: dict[str, Any] = config["applications"][0]["args"]["engine"]
    return engine


def served_on_kubernetes() -> dict[str, Any]:
    documents = yaml.safe_load_all((REPOSITORY / "deploy/kubernetes/rayservice.yaml").read_text())
    [config] = [each["spec"]["serveConfigV2"] for each in documents if each["kind"] == "RayService"]
    served: dict[str, Any] = yaml.safe_load(config)
    return served


@pytest.fixture(scope="module")
def on_a_card(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM makes of each config, with the shape of a small model in the place of its own."""
    model = tmp_path_factory.mktemp("model")
    shape = Qwen2Config(num_hidden_layers=24, hidden_size=896, num_attention_heads=16, max_position_embeddings=LONGEST)
    shape.architectures = ["Qwen2ForCausalLM"]
    shape.save_pretrained(model)
    (model / "generation_config.json").write_text('{"repetition_penalty": 1.05, "top_p": 0.8}')
    generated = generated_config(ServedModel(str(model), gpus=4, tensor_parallel_size=2), ["math"], {}, {})
    engines = {
        "serve_config.yaml": engine_of(yaml.safe_load((REPOSITORY / "serve_config.yaml").read_text())),
        "kubernetes": engine_of(served_on_kubernetes()),
        "rollout serve": engine_of(generated),
        "adapters and transfers": engine_of(generated)
        | {"enable_lora": True, "weight_transfer_config": {"backend": "nccl"}},
    }
    given = json.dumps([engine | {"model": str(model)} for engine in engines.values()])
    program = [sys.executable, "-m", "tests.deployments.generation.faked_card"]
    ended = subprocess.run(program, input=given, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(zip(engines, json.loads(ended.stdout), strict=True))


def test_each_config_has_the_batches_of_vllms_server_and_schedules_ahead(on_a_card: dict[str, Any]) -> None:
    for found in on_a_card.values():
        assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (1024, 8192)
        assert found["async_scheduling"] is True


def test_the_workers_are_as_many_as_the_gpus_that_ray_reserves(on_a_card: dict[str, Any]) -> None:
    assert {name: (found["world_size"], found["gpus"]) for name, found in on_a_card.items()} == {
        "serve_config.yaml": (1, 1),
        "kubernetes": (1, 1),
        "rollout serve": (2, 2),
        "adapters and transfers": (2, 2),
    }
    assert [found["executor"] for found in on_a_card.values()] == ["uni", "uni", "mp", "mp"]


def test_what_a_call_leaves_out_is_not_sampled_as_the_models_generation_config_says(on_a_card: dict[str, Any]) -> None:
    assert [found["defaults"] for found in on_a_card.values()] == [{}] * 4


def test_the_context_is_the_configs_or_the_models(on_a_card: dict[str, Any]) -> None:
    assert [found["max_model_len"] for found in on_a_card.values()] == [16384, 16384, LONGEST, LONGEST]
