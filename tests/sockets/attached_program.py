"""What clients of vLLM's control routes do with a service: `python -m tests.sockets.attached_program NAME JOB RESULTS`.

They run with their sources on the path, unmodified. Stood in for: NCCL, by gloo; of SkyRL its training backends and its
trainer's configuration; of TRL the attention kernel, which needs a GPU. `JOB` is JSON with the address, prompts of
token ids and the folders of weights. `RESULTS` becomes JSON.
"""

import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODEL = "tiny"
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 96}
ADAPTER = "skyrl-lora"
Made = dict[str, Any]
"""Of each prompt its token ids and their log-probabilities."""


async def trained(
    job: dict[str, Any],
    generate: Callable[..., Coroutine[Any, Any, Made]],
    sync: Callable[[str], Awaitable[None]],
    adapt: Callable[[str], Awaitable[None]],
) -> dict[str, Any]:
    """What is generated while each checkpoint comes and after it, and by an adapter that is written over each time."""
    rounds, adapted = [], []
    for folder in job["checkpoints"]:
        running = asyncio.create_task(generate(LONG))
        await asyncio.sleep(0.2)
        assert not running.done(), "the generations had ended before the weights came"
        await sync(folder)
        rounds.append({"across": await running, "after": await generate(GREEDY)})
    for folder in job["adapters"]:
        shutil.copytree(folder, job["adapter"], dirs_exist_ok=True)
        await adapt(job["adapter"])
        adapted.append(await generate(GREEDY, ADAPTER))
    return {"rounds": rounds, "adapted": adapted}


async def of_skyrl(job: dict[str, Any]) -> dict[str, Any]:
    """A transfer into each checkpoint under a pause, then an adapter that is written over and loaded again."""
    import torch
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer import nccl_engine

    from service.startup.config import free_port
    from tests.live.gloo_transfer import GlooEndpoint
    from tests.sockets.trainer_program import stand_in

    stand_in("skyrl.backends.backend", AbstractBackend=object)
    stand_in("skyrl.train.utils.utils", str_to_torch_dtype=None)
    engine: Any = nccl_engine.NCCLWeightTransferEngine
    # vLLM had both until 0.27; SkyRL asks for 0.26.
    engine.trainer_init = staticmethod(GlooEndpoint)
    engine.trainer_send_weights = staticmethod(lambda iterator, trainer_args: trainer_args["group"].send(iterator))
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk
    from skyrl.backends.skyrl_train.weight_sync.broadcast_strategy import BroadcastInitInfo, BroadcastTransferStrategy

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    client = RemoteInferenceClient(job["url"], [job["url"]], data_parallel_size=1, model_name=MODEL)

    async def generate(sampling: dict[str, Any], model: str = MODEL) -> Made:
        sessions = [f"trajectory-{number}" for number in range(len(job["prompts"]))]
        asked = {"prompt_token_ids": job["prompts"], "session_ids": sessions, "cache_salt": str(client.weight_version)}
        made = await client.generate({**asked, "sampling_params": {**sampling, "logprobs": 0}}, model=model)
        return {"ids": made["response_ids"], "logprobs": made["response_logprobs"]}

    world_size, _ = await client.get_world_size()
    there = BroadcastInitInfo(True, "127.0.0.1", free_port(), rank_offset=1, world_size=world_size + 1)
    connecting = asyncio.create_task(client.init_weight_update_communicator(there))
    sender = await asyncio.to_thread(BroadcastTransferStrategy.create_sender, there, client)
    await connecting

    async def sync(folder: str) -> None:
        state = load_file(Path(folder, "model.safetensors"))
        names, types = list(state), [str(each.dtype).removeprefix("torch.") for each in state.values()]
        shapes = [list(each.shape) for each in state.values()]
        chunk = WeightChunk(names, types, shapes, list(state.values()))
        await client.pause()
        await client.reset_prefix_cache(reset_running_requests=True)
        await sender.send_chunks([chunk], {"names": names, "dtype_names": types, "shapes": shapes})
        client.increment_weight_version()
        await client.resume()

    async def adapt(folder: str) -> None:
        await client.load_lora_adapter(ADAPTER, folder)

    results = await trained(job, generate, sync, adapt)
    await client.unload_lora_adapter(ADAPTER)
    await client.finish_session("trajectory-0")
    await client.teardown()
    return {"world_size": world_size, **results}


async def of_prime_rl(job: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints by their folders, which is its default, an adapter, and generations by its renderers."""
    from prime_rl.configs.shared import ClientConfig
    from prime_rl.utils.client import InferencePool
    from renderers.base import create_renderer
    from renderers.client import generate as generate_one
    from transformers import AutoTokenizer
    from verifiers.v1.clients.base import build_async_openai

    pool = InferencePool(ClientConfig(base_url=f"{job['url']}/v1"), MODEL, train_client_type="renderer")
    await pool.wait_for_ready(MODEL, timeout=60)
    openai = build_async_openai(pool.train_client)
    renderer = create_renderer(AutoTokenizer.from_pretrained(job["model"]))

    async def generate(sampling: dict[str, Any], model: str = MODEL) -> Made:
        asked = {"client": openai, "renderer": renderer, "model": model, "sampling_params": sampling}
        sessions = ({"X-Session-ID": f"trajectory-{number}"} for number in range(len(job["prompts"])))
        calls = [
            generate_one(messages=[], prompt_ids=prompt, cache_salt=model, extra_headers=session, **asked)
            for prompt, session in zip(job["prompts"], sessions, strict=True)
        ]
        made = await asyncio.gather(*calls)
        return {name: [one[f"completion_{name}"] for one in made] for name in ("ids", "logprobs")}

    async def sync(folder: str) -> None:
        await pool.update_weights(Path(folder))

    async def adapt(folder: str) -> None:
        await pool.update_weights(Path(folder), lora_name=ADAPTER)

    results = await trained(job, generate, sync, adapt)
    await pool.stop()
    return results


def of_trl(job: dict[str, Any]) -> dict[str, Any]:
    """Three steps of a training of all weights, of which the last that came are saved."""
    import torch
    from safetensors.torch import save_file
    from trl.experimental.async_grpo import weight_transfer

    from examples.train_async_grpo import parser, train
    from tests.live.gloo_transfer import GlooEndpoint

    sent: dict[str, torch.Tensor] = {}

    def opened(init_info: Any) -> SimpleNamespace:
        # TRL lets go of NCCL's own group in the end.
        return SimpleNamespace(endpoint=GlooEndpoint(init_info), group=SimpleNamespace())

    def send(iterator: Any, group: SimpleNamespace, **_options: Any) -> None:
        sent.update((name, tensor.detach().clone()) for name, tensor in iterator)
        group.endpoint.send(sent.items())

    vars(weight_transfer).update(open_trainer_endpoint=opened, packed_nccl_broadcast_producer=send)
    asked = [job["url"], job["adapter"], "--model", job["model"], "--steps", "3", "--all-weights"]
    steps = train(parser().parse_args([*asked, "--max-staleness", "0", "--learning-rate", "1e-3"]))
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in sent.items()}, job["sent"])
    return {"steps": steps}


def of_nemo_rl(job: dict[str, Any]) -> dict[str, Any]:
    """A batch of its own class, played by the service and flattened. Its trainer needs transformers before 5.12."""
    import torch

    from rollout_client import RolloutClient
    from rollout_client.trainers.nemo_rl import run_async_multi_turn_rollout
    from tests.sockets.trainer_program import stand_in

    stand_in("pynvml")
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    logs = [[{"role": "user", "content": "", "token_ids": torch.tensor(ids)}] for ids in job["prompts"]]
    others = {"extra_env_info": [{"ground_truth": "9"}] * len(logs), "task_name": ["math"] * len(logs)}
    batch = BatchedDataDict({"message_log": logs, **others}).repeat_interleave(2)
    with RolloutClient(job["url"]) as client:
        played, _ = run_async_multi_turn_rollout(client, batch, 100, 1, sampling={"max_new_tokens": 12})
    messages = [message for log in played["message_log"] for message in log]
    generated = sum(len(message["token_ids"]) for message in messages if "generation_logprobs" in message)
    for message in messages:
        message.setdefault("generation_logprobs", torch.zeros(len(message["token_ids"])))
    flat, lengths = batched_message_log_to_flat_message(played["message_log"])
    found = {"kind": type(played).__name__, "lengths": lengths.tolist(), "generated": generated}
    return found | {"shape": list(flat["generation_logprobs"].shape)}


if __name__ == "__main__":
    play: Callable[[dict[str, Any]], Any] = globals()[f"of_{sys.argv[1]}"]
    answered = play(json.loads(Path(sys.argv[2]).read_text()))
    answered = asyncio.run(answered) if asyncio.iscoroutine(answered) else answered
    Path(sys.argv[3]).write_text(json.dumps(answered))
