"""The Serve config that `rollout serve` makes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.generation.settings import EngineSettings
from examples.task_configs import known_tasks
from rollout_env.loading import load_environment_class
from service.settings import ServiceSettings
from service.startup import generated_config as generated_configs
from service.startup.config import ServiceNotStarted
from service.startup.generated_config import (
    BUILT_IN,
    EMBEDDED_MODEL,
    EMBEDDED_MODEL_THAT_SEES,
    ServedModel,
    engine_fields,
    generated_config,
    sees,
)
from tests.paths import REPOSITORY


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_configs, "resources_of_this_machine", lambda: {"CPU": 2.0})


CPU = ServedModel(str(EMBEDDED_MODEL), gpus=0)


def generated(served: ServedModel = CPU, *tasks: str, **access: str) -> dict[str, Any]:
    config = generated_config(served, tasks or ["math"], {}, access)
    ServeDeploySchema.model_validate(config, extra="forbid")
    ServiceSettings.model_validate(config["applications"][0]["args"])
    return config


def application(served: ServedModel = CPU, *tasks: str, **access: str) -> dict[str, Any]:
    [found] = generated(served, *tasks, **access)["applications"]
    return dict(found)


def shipped_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / name).read_text())
    return config


def replicas(of: dict[str, Any]) -> dict[str, int]:
    return {deployment["name"]: deployment["num_replicas"] for deployment in of["deployments"]}


def test_the_embedded_model_with_its_tasks_is_the_shipped_config() -> None:
    [shipped] = shipped_config("serve_config.cpu.yaml")["applications"]
    made = application(CPU, "math", "sliding_puzzle")
    shipped["args"]["engine"]["model"] = str(EMBEDDED_MODEL)
    assert made["args"] == shipped["args"]
    assert replicas(made) == replicas(shipped)


def test_gpus_are_divided_between_replicas() -> None:
    made = application(ServedModel("Qwen/Qwen3-8B", gpus=8, tensor_parallel_size=2), "math")
    engine = made["args"]["engine"]
    [shipped] = shipped_config("serve_config.yaml")["applications"]
    del shipped["args"]["engine"]["max_model_len"]
    given = {"model": "Qwen/Qwen3-8B", "tensor_parallel_size": 2, "engines_per_gpu": 1}
    assert engine == shipped["args"]["engine"] | given
    assert replicas(made) == {"Ingress": 1, "Generator": 4, "math": 1}


def test_engines_that_share_a_card_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_configs, "engines_on_a_card", lambda engine: {"auto": 4}[engine.engines_per_gpu])
    made = application(ServedModel("org/small", gpus=2))
    assert (made["args"]["engine"]["engines_per_gpu"], replicas(made)["Generator"]) == (4, 8)
    monkeypatch.undo()
    made = application(ServedModel("org/small", gpus=2, engine={"engines_per_gpu": 3}))
    assert (made["args"]["engine"]["engines_per_gpu"], replicas(made)["Generator"]) == (3, 6)
    wrong = generated_config(ServedModel("org/small", gpus=2, engine={"engines_per_gpu": 0}), ["math"], {}, {})
    assert wrong["applications"][0]["args"]["engine"]["engines_per_gpu"] == 0


@pytest.mark.parametrize(("cores", "ingresses"), [(2, 1), (15, 1), (16, 2), (31, 3), (192, 4)])
def test_many_cores_have_several_ingresses(cores: float, ingresses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_configs, "resources_of_this_machine", lambda: {"CPU": cores})
    assert replicas(application())["Ingress"] == ingresses


def test_on_processors_a_batch_has_room_for_the_longest_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    lengths = ("max_model_len", "max_num_batched_tokens")
    short = application(ServedModel(str(tmp_path), gpus=0))["args"]["engine"]
    assert [short[name] for name in lengths] == [1024, 1024]
    given = application(ServedModel(str(tmp_path), gpus=0, engine={"max_model_len": 512}))["args"]["engine"]
    assert [given[name] for name in lengths] == [512, 512]
    hub = application(ServedModel("Qwen/Qwen3-0.6B", gpus=0))["args"]["engine"]
    assert [hub[name] for name in lengths] == [4096, 4096]


def test_any_field_of_the_engine_can_be_given_and_takes_precedence() -> None:
    fields = engine_fields(
        ["max_num_seqs=512", "gpu-memory-utilization=0.5", "weight_transfer_config={backend: nccl}", "quantization=fp8"]
    )
    assert fields == {
        "max_num_seqs": 512,
        "gpu_memory_utilization": 0.5,
        "weight_transfer_config": {"backend": "nccl"},
        "quantization": "fp8",
    }
    assert application(ServedModel("Qwen/Qwen3-8B", gpus=1, engine=fields))["args"]["engine"].items() >= fields.items()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["max_num_seqs"], "--engine: 'max_num_seqs' is not KEY=VALUE"),
        (["a={"], "--engine: the value of a is not YAML"),
    ],
)
def test_a_field_that_cannot_be_read_is_a_sentence(given: list[str], message: str) -> None:
    with pytest.raises(ServiceNotStarted, match=message):
        engine_fields(given)


def test_on_a_gpu_the_context_may_be_as_long_as_the_memory_holds() -> None:
    as_memory_holds = engine_fields(["max_model_len=auto"])
    made = application(ServedModel("Qwen/Qwen3-8B", gpus=1, engine=as_memory_holds))["args"]["engine"]
    assert EngineSettings.model_validate(made).engine_args()["max_model_len"] == -1


def test_a_task_is_a_built_in_one_or_an_environment_by_its_import_path() -> None:
    made = application(CPU, "code", "my_package.games:GuessTheNumberEnv", "hard=my_package.games:GuessTheNumberEnv")
    assert made["args"]["environments"] == {
        "code": {"import_path": "deployments.tasks.code:CodeEnvironment"},
        "guess_the_number": {"import_path": "my_package.games:GuessTheNumberEnv"},
        "hard": {"import_path": "my_package.games:GuessTheNumberEnv"},
    }


@pytest.mark.parametrize("task_name", BUILT_IN)
def test_each_built_in_task_is_there_and_needs_no_settings(task_name: str) -> None:
    assert load_environment_class(BUILT_IN[task_name])
    assert known_tasks()[task_name] == {"import_path": BUILT_IN[task_name]}


def test_where_it_listens_and_who_may_come_in_are_in_the_config() -> None:
    made = generated_config(CPU, ["math"], {"host": "0.0.0.0", "port": 9000}, {"keys_file": "/keys.yaml"})
    assert made["http_options"] == {"host": "0.0.0.0", "port": 9000}
    assert made["applications"][0]["args"]["access"] == {"keys_file": "/keys.yaml"}
    assert generated()["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert "access" not in application()["args"]


def test_a_service_takes_images_if_the_model_sees() -> None:
    assert application(ServedModel(str(EMBEDDED_MODEL_THAT_SEES), gpus=0), "shapes")["args"]["images"] == {}
    assert "images" not in application()["args"]


def test_whether_a_model_sees_is_what_its_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "config.json"
    cached.write_text(json.dumps({"vision_config": {}, "text_config": {"max_position_embeddings": 77}}))
    monkeypatch.setattr(
        "service.startup.generated_config.try_to_load_from_cache",
        lambda repository, _file: str(cached) if repository == "org/downloaded" else None,
    )
    named = ["models/shapes", "models/tiny", str(tmp_path), "org/downloaded", "org/elsewhere"]
    assert [sees(name) for name in named] == [True, False, True, True, False]
    assert application(ServedModel("org/downloaded", gpus=0))["args"]["engine"]["max_model_len"] == 77
    monkeypatch.undo()
    assert not sees("/no/such/folder")


@pytest.mark.parametrize(
    ("served", "tasks", "message"),
    [
        (ServedModel("m", gpus=3, tensor_parallel_size=2), ["math"], "--gpus: 3 is not a multiple of"),
        (CPU, ["maths"], "--env: 'maths' is not a task. Write MODULE:CLASS"),
        (CPU, ["x=math"], "--env: 'x=math' is not a task"),
        (CPU, ["math", "a:Math"], "--env: there are two tasks 'math'"),
    ],
)
def test_what_cannot_work_is_a_sentence_with_the_option(served: ServedModel, tasks: list[str], message: str) -> None:
    with pytest.raises(ServiceNotStarted, match=message):
        generated_config(served, tasks, {}, {})
