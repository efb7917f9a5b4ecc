"""Serve configs of a check of a GPU."""

from pathlib import Path

from benchmarks.gpu_check.configs import Machine
from service.settings import ServiceSettings

MODEL = Path("models/tiny")


def test_replicas_of_one_card_share_it_and_their_cache_is_given_in_bytes() -> None:
    machine = Machine("gpu", Path())
    config = machine.served(machine.engine(MODEL, max_model_len=64), replicas=2)
    [application] = config["applications"]
    [generator] = [entry for entry in application["deployments"] if entry["name"] == "Generator"]
    assert (generator["num_replicas"], generator["ray_actor_options"]) == (2, {"num_cpus": 1, "num_gpus": 0.45})
    assert application["args"]["engine"]["kv_cache_memory_bytes"] == 4 * 2**30
    assert ServiceSettings.model_validate(application["args"]).engine.ray_actor_options()["num_gpus"] == 1


def test_without_a_card_the_engine_is_that_of_processors() -> None:
    engine = Machine("cpu", Path()).engine(MODEL, max_model_len=64, kv_cache_memory_bytes=1, enable_lora=True)
    assert (engine["device"], engine["max_model_len"], engine["enable_lora"]) == ("cpu", 64, True)
    assert "kv_cache_memory_bytes" not in engine
