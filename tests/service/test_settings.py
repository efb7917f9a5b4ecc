"""What the app builder accepts, and the configs in the repository."""

from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.simulation.simulated_generator_replica import SimulatedGeneratorReplica
from deployments.generation.settings import EngineSettings
from rollout_env.loading import load_environment
from service.settings import ServiceSettings
from tests.paths import SIMULATED_REPLICA

ENGINE = {"device": "cpu", "model": "models/tiny"}
MATH = {"import_path": "deployments.tasks.math:MathEnvironment"}
AGENT = {"import_path": "agents:agent"}


GAME = {"agent": {"game": {"import_path": "games:game"}}}
POLICY_AS_USER = {"models": {"user": {"policy": "run-b"}}}
AGENT_AND_USER = {"agent": AGENT, "models": {"a": {}}, "user_simulator": {"model": "a"}}
FOLLOWED = {"folder": "nowhere://x", "format": "safetensors"}


def task(**fields: Any) -> dict[str, Any]:
    return {"environments": {"math": {**MATH, **fields}}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"environments": {}}, "at least 1 item"),
        ({"engine": {"device": "cpu"}}, "engine.model"),
        # No token counts as more than 10: a mean never is above it.
        ({"rollout_records": {"most_mean_ratio": 10}}, "less than 10"),
        ({"environments": {"Images": MATH}}, "Images is the name of another deployment"),
        ({"images": {"max_byte": 1}}, "permitted are folder"),
        ({"enviroments": {}}, "enviroments\n  unknown; permitted are engine, environments, reward_models, responses"),
        (task(args={}), "environments.math.args\n  unknown; permitted are import_path, arguments"),
        (task(reward_models=["helpful"]), "environments.math.reward_models: there is no helpful under reward_models"),
        ({"reward_models": {"math": {"model": "m"}}}, "reward_models: math is the name of another deployment"),
        ({"engine": {**ENGINE, "logprobs_mode": "raw_logprobs"}}, "cannot be set"),
        ({"engine": {**ENGINE, "replica": "nowhere:Replica"}}, "No module named 'nowhere'"),
        ({"engine": {**ENGINE, "mm_processor_cache_gb": 4}, "images": {}}, "has no meaning beside images"),
        ({"engine": {**ENGINE, "data_parallel_size": 2}}, "more of them are replicas: set num_replicas"),
        ({"engine": {**ENGINE, "distributed_executor_backend": "ray"}}, "an engine lies on one node"),
        ({"engine": {**ENGINE, "weight_transfer_config": {"backend": "ipc"}}}, "the backend ipc is refused"),
        ({"engine": {"model": "m", "gpu_memory_utilization": 0.96}}, r"0\.96 leaves no memory for the layers"),
        ({"policy": {"follow": FOLLOWED}}, "nowhere://x cannot be read here: Protocol not known: nowhere"),
        ({"policy": {"follow": {"folder": "/f"}}}, "format"),
        (
            {"policy": {"transfer": {"trainers": ["10.0.0.4:29500"]}}},
            r"by the routes of trainers: add `trainers: \{\}`",
        ),
        ({"trainers": {"pause_s": 0}}, r"trainers\.pause_s"),
        (task(user_simulator={"model": "user"}), "user_simulator.model: there is no user under models"),
        ({"access": {"keys_file": "k"}, **task(**POLICY_AS_USER)}, "math.models.user.api_key_variable is missing"),
        ({"sessions": {}, **task(**GAME)}, "import_path has no meaning beside agent.game"),
        (task(**AGENT_AND_USER), "user_simulator talks to the policy, and here an agent plays"),
        ({"environments": {"math": {}}}, "import_path is missing"),
        (task(data={"columns": {"reward": "x"}}), "give either files or hub"),
        (task(data={"files": "a", "columns": {"status": "x"}}), r"columns\.status: a sample cannot have this field"),
        (task(data={"files": "a", "columns": {"idx.y": "x"}}), r"columns\.idx\.y: a sample cannot have this field"),
        ({"scheduling": {"window_factor": 0.5}}, "window_factor"),
        ({"sessions": {}, "environments": {"math": {"agent": AGENT}}}, "import_path is missing"),
        (task(agent=AGENT), "agent is played in sessions"),
        (
            {"sessions": {}, "environments": {"math": {**MATH, "agent": AGENT}, "math_agent": MATH}},
            "math_agent is the deployment of an agent",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ServiceSettings.model_validate({"engine": ENGINE, "environments": {"math": MATH}} | settings)


@pytest.mark.parametrize(
    "fields", [{"gpu_memory_utilization": 0.95}, {"gpu_memory_utilization": 0.96, "device": "cpu"}]
)
def test_memory_for_the_layers_of_new_weights_is_kept_on_a_card(fields: dict[str, Any]) -> None:
    EngineSettings.model_validate({"model": "m", **fields})


def test_a_replica_by_import_path_has_fields_of_its_own() -> None:
    engine = EngineSettings.model_validate({**ENGINE, "replica": SIMULATED_REPLICA, "simulated": {"stage_s": 1}})
    assert engine.replica is SimulatedGeneratorReplica
    assert engine.model_extra == {"simulated": {"stage_s": 1}}
    assert "replica" not in engine.engine_args()


def test_a_replica_reserves_a_fraction_of_a_core() -> None:
    settings = ServiceSettings.model_validate(
        {"engine": {**ENGINE, "num_cpus": 0.1}, "environments": {"math": MATH, "mine": MATH}}
    )
    assert settings.ray_actor_options() == {
        "Ingress": {"num_cpus": 0.2},
        "Generator": {"num_cpus": 0.1, "num_gpus": 0},
        "Policy": {"num_cpus": 0.1},
        "Jobs": {"num_cpus": 0.1},
        "math": {"num_cpus": 0.1},
        "mine": {"num_cpus": 0.1},
    }


def test_the_image_store_is_there_where_the_config_has_images() -> None:
    without = ServiceSettings.model_validate({"engine": ENGINE, "environments": {"math": MATH}})
    assert (without.images, "Images" in without.ray_actor_options()) == (None, False)
    settings = ServiceSettings.model_validate({"engine": ENGINE, "environments": {"math": MATH}, "images": {}})
    assert settings.images is not None
    assert settings.ray_actor_options()["Images"] == {"num_cpus": 0.1}


def test_tensor_and_pipeline_parallel_size_set_the_gpus_of_a_replica() -> None:
    on_gpus = EngineSettings(model="m", tensor_parallel_size=4, pipeline_parallel_size=2, num_cpus=3)
    assert on_gpus.ray_actor_options() == {"num_cpus": 3, "num_gpus": 8}
    on_processors = EngineSettings(model="m", device="cpu", tensor_parallel_size=2)
    assert on_processors.ray_actor_options() == {"num_cpus": 1, "num_gpus": 0}


def test_further_engine_fields_reach_the_engine_as_they_are() -> None:
    settings = EngineSettings(model="m", tensor_parallel_size=2, gpu_memory_utilization=0.5)  # type: ignore[call-arg]
    assert settings.engine_args() == {
        "model": "m",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "trust_remote_code": False,
        "enable_lora": False,
        "max_lora_rank": 16,
        "scheduling_policy": "priority",
        "allowed_media_domains": ["none.invalid"],
        "tokenizer_mode": "hf",
        "generation_config": "vllm",
        "max_logprobs": 256,
        "mm_processor_cache_gb": 0,
    }


def test_an_engine_on_processors_has_one_process_unless_it_is_divided() -> None:
    variable = "VLLM_ENABLE_V1_MULTIPROCESSING"
    alone = EngineSettings(model="m", device="cpu")
    assert alone.process_variables[variable] == "0"
    assert variable not in alone.model_copy(update={"tensor_parallel_size": 2}).process_variables
    asked = EngineSettings(model="m", device="cpu", environment_variables={variable: "1"})
    assert asked.process_variables[variable] == "1"


def test_kernels_that_are_compiled_at_first_use_are_off() -> None:
    assert EngineSettings(model="m").process_variables == {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
    }
    given = {"VLLM_USE_FLASHINFER_SAMPLER": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    assert EngineSettings(model="m", environment_variables=given).process_variables == {
        "VLLM_USE_DEEP_GEMM": "0",
        **given,
    }


def test_a_task_whose_agent_scores_it_needs_no_environment() -> None:
    environments = {"math": {"agent": {**AGENT, "scored_by": "agent"}}}
    settings = ServiceSettings.model_validate({"engine": ENGINE, "sessions": {}, "environments": environments})
    made = load_environment(settings.environments["math"].import_path, {})
    assert [one["messages"][0]["content"] for one in made.example_samples(2, 5)] == ["Question 5", "Question 6"]
    assert settings.ray_actor_options()["math_agent"] == {"num_cpus": 0.1}


@pytest.mark.parametrize(
    ("fields", "rank"),
    [({}, 0), ({"max_lora_rank": 8}, 0), ({"enable_lora": True}, 16), ({"enable_lora": True, "max_lora_rank": 8}, 8)],
)
def test_the_highest_rank_of_an_adapter_is_zero_where_adapters_are_off(fields: dict[str, Any], rank: int) -> None:
    assert EngineSettings(model="m", **fields).highest_rank == rank
