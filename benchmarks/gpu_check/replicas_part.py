"""Two replicas on one card: their streams differ, and no rollout is lost when the engine of one dies."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from benchmarks.gpu_check.configs import GIB, Machine, running_service
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.random_model import distinct
from benchmarks.process_group import ENGINE_MARKS, command_of
from rollout_client import Sampling
from service.startup.config import REPOSITORY

MODEL = REPOSITORY / "models" / "tiny"
GAMES = 128


def check(machine: Machine, findings: Findings) -> None:
    engine = machine.engine(MODEL, max_model_len=2048, kv_cache_memory_bytes=GIB, num_cpus=0.5)
    with running_service(machine.served(engine, replicas=2), findings, "two replicas start") as (_, client):
        name = "unseeded rollouts of one prompt differ on two replicas"
        with findings.attempt(name):
            samples = client.example_samples("math", 1, seed=1)
            sampling = Sampling(temperature=2.0, max_new_tokens=24, ignore_eos=True)
            group = client.rollout(samples, num_generations=256, sampling=sampling).samples
            findings.add(name, distinct(group) == len(group), distinct=distinct(group), of=len(group))
        name = "no rollout is lost when the engine of one replica dies"
        with findings.attempt(name), ThreadPoolExecutor(1) as thread:
            games = client.example_samples("sliding_puzzle", GAMES)
            sampling = Sampling(temperature=1.5, max_new_tokens=128, ignore_eos=True)
            began = time.monotonic()
            playing = thread.submit(client.rollout, games, sampling=sampling, max_rollout_turns=6)
            time.sleep(1.0)
            everyone = psutil.Process().children(recursive=True)
            cores = [one for one in everyone if "EngineCore" in command_of(one)] or [
                one for one in everyone if any(mark in command_of(one) for mark in ENGINE_MARKS)
            ]
            busy = not playing.done()
            cores[0].send_signal(signal.SIGKILL)
            statuses = sorted({sample.status for sample in playing.result().samples})
            findings.add(
                name,
                busy and "error" not in statuses,
                statuses=statuses,
                engines=len(cores),
                seconds=round(time.monotonic() - began, 1),
            )
