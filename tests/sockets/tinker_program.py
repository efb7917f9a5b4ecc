"""What Tinker's client and tinker-cookbook get from a service: `python tinker_program.py URL MODEL ASKED RESULTS`.

With `LONG` for `ASKED`, long samples alone, which it says on its output once they have begun.

It runs where both are installed, unmodified. `ASKED` is JSON with the prompts, `RESULTS` becomes JSON with what came.
Stood in for: the data set of GSM8K, which is fetched from a hub, by sums; and the renderer, by that of the model.
"""

import asyncio
import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tinker
from tinker import ModelInput, SamplingParams
from tinker_cookbook import renderers
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.eval.benchmarks import BenchmarkConfig, gsm8k, run_benchmark
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset
from tinker_cookbook.renderers.base import ParseTermination, RenderContext, RenderedMessage
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.tokenizer_utils import get_tokenizer

KEY = "tml-any"
LONG = "LONG"
BEGUN = "begun"
SUMS = [(20, 22), (3, 4), (11, 30), (8, 9)]


class ModelRenderer(renderers.Renderer):  # type: ignore[misc]  # the cookbook is not where types are checked
    """The chat template of `models/tiny`."""

    def _tokens(self, text: str) -> tinker.EncodedTextChunk:
        return tinker.EncodedTextChunk(tokens=self.tokenizer.encode(text, add_special_tokens=False))

    def render_message(self, message: Any, ctx: RenderContext) -> RenderedMessage:
        output = self._tokens(f"{message['content']}<|end|>\n")
        return RenderedMessage(header=self._tokens(f"<|{message['role']}|>\n"), output=[output])

    def get_stop_sequences(self) -> list[int]:
        return [self._end_message_token]

    @property
    def _end_message_token(self) -> int:
        return int(self._tokens("<|end|>").tokens[0])

    def parse_response(self, response: list[int]) -> tuple[Any, ParseTermination]:
        is_whole = response[-1:] == [self._end_message_token]
        text = self.tokenizer.decode(response[:-1] if is_whole else response)
        ended = ParseTermination.STOP_SEQUENCE if is_whole else ParseTermination.MALFORMED
        return {"role": "assistant", "content": text}, ended


def sampled(client: tinker.SamplingClient, prompt: Sequence[int], count: int = 1, **params: Any) -> list[Any]:
    response = client.sample(ModelInput.from_ints([*prompt]), count, SamplingParams(**params)).result()
    return [[each.tokens, each.logprobs, each.stop_reason] for each in response.sequences]


def refusal(call: Callable[[], Any]) -> list[Any]:
    """The type and the text of what it raises, and the seconds that it took."""
    began = time.monotonic()
    try:
        return ["", repr(call()), 0.0]
    except Exception as error:  # noqa: BLE001 - it is what is asked for
        return [type(error).__name__, str(error), time.monotonic() - began]


def client_results(service: tinker.ServiceClient, model: str, asked: dict[str, Any]) -> dict[str, Any]:
    client = service.create_sampling_client(base_model=model).result()
    prompt, sampling = asked["prompts"][0], {"max_tokens": 16, "temperature": 2.0}
    scored = client.sample(
        ModelInput.from_ints(prompt),
        2,
        SamplingParams(max_tokens=4),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result()
    clone = tinker.SamplingClient.from_sampler_handle(client.get_sampler_handle(), api_key=KEY)
    named = {
        path: [sampled(service.create_sampling_client(model_path=path).result(), each, temperature=0)[0]
               for each in asked["prompts"]]
        for path in asked["paths"]
    }  # fmt: skip
    many = [client.sample(ModelInput.from_ints(prompt), 2, SamplingParams(max_tokens=8)) for _ in range(100)]
    ids = [sequence.sequence_id for future in many for sequence in future.result().sequences]
    return {
        "greedy": [sampled(client, each, temperature=0)[0] for each in asked["prompts"]],
        "seeded": [sampled(client, prompt, 3, seed=seed, **sampling) for seed in (5, 5, 6)],
        "stopped": [
            sampled(client, prompt, max_tokens=30, temperature=0, stop=stop)[0]
            for stop in (None, "oxe", ["{", "zz"], [123], [])
        ],
        "logprobs": [client.compute_logprobs(ModelInput.from_ints(each)).result() for each in asked["prompts"]],
        "last": client.compute_logprobs(ModelInput.from_ints(prompt), prompt_logprobs_last_n=4).result(),
        "single": client.compute_logprobs(ModelInput.from_ints(prompt[:1])).result(),
        "prompt_logprobs": scored.prompt_logprobs,
        "top_prompt_logprobs": scored.topk_prompt_logprobs,
        "top_logprobs": [[each.tokens, each.logprobs, each.topk_logprobs] for each in scored.sequences],
        "cloned": sampled(clone, prompt, temperature=0)[0],
        "pickled": sampled(pickle.loads(pickle.dumps(client)), prompt, temperature=0)[0],
        "named": named,
        "many": [len(ids), len(set(ids)), len({owner_of(each) for each in ids})],
        "refused": {
            "training": refusal(lambda: service.create_lora_training_client(base_model=model, rank=8).result()),
            "model": refusal(lambda: service.create_sampling_client(base_model="Qwen/Qwen3-8B").result()),
            "path": refusal(lambda: service.create_sampling_client(model_path="tinker://run/weights/final").result()),
            "policy": refusal(lambda: service.create_sampling_client(model_path="tinker://nobody").result()),
            "token": refusal(lambda: sampled(client, [1, 999])),
            "temperature": refusal(lambda: sampled(client, prompt, temperature=3.0)),
            "runs": refusal(lambda: tinker.RestClient(api_key=KEY).list_training_runs().result()),
        },
        "cancelled": cancelled(client, prompt),
    }


def owner_of(sequence_id: str) -> str:
    """The ingress replica that began it."""
    return sequence_id.rpartition("@")[2].rpartition("/")[0]


def long_results(client: tinker.SamplingClient) -> dict[str, Any]:
    """As many samples as are admitted, while something happens."""
    endless = SamplingParams(max_tokens=400, stop=[])
    futures = [client.sample(ModelInput.from_ints([5, 6, place]), 1, endless) for place in range(24)]
    time.sleep(2)
    print(BEGUN, flush=True)  # noqa: T201 - whoever started this waits for it
    responses = [future.result().sequences[0] for future in futures]
    return {
        "lengths": [len(response.tokens) for response in responses],
        "owners": sorted({owner_of(response.sequence_id) for response in responses}),
    }


def cancelled(client: tinker.SamplingClient, prompt: Sequence[int]) -> bool:
    endless = SamplingParams(max_tokens=4000, stop=[])
    future = client.sample(ModelInput.from_ints([*prompt]), 1, endless).future()
    time.sleep(1)
    return bool(future.cancel())


async def cookbook_results(client: tinker.SamplingClient, model: str) -> dict[str, Any]:
    renderer = renderers.get_renderer("rollout/tiny", tokenizer=get_tokenizer(model))
    gsm8k.load_benchmark_dataset = lambda *_, **__: [
        {"question": f"What is {a} + {b}?", "answer": f"It is #### {a + b}"} for a, b in SUMS
    ]
    gsm8k.limit_dataset = lambda rows, _: rows
    gsm8k.GSM8KBenchmarkBuilder.recommended_system_prompt = None
    benchmark = await run_benchmark("gsm8k", client, renderer, BenchmarkConfig(max_tokens=64, temperature=0.0))
    dataset = ArithmeticDataset(batch_size=4, renderer=renderer, group_size=4, n_batches=1, include_fewshot=False)
    policy = TinkerTokenCompleter(client, max_tokens=32)
    groups = await asyncio.gather(*(do_group_rollout(builder, policy) for builder in dataset.get_batch(0)))
    evaluator: SamplingClientEvaluator = RLTestSetEvaluator(dataset, max_tokens=32)
    return {
        "benchmark": [benchmark.score, benchmark.num_examples, benchmark.num_correct, benchmark.num_errors],
        "rewards": [group.get_total_rewards() for group in groups],
        "actions": [
            [step.ob.to_ints(), step.ac.tokens, step.ac.logprobs]
            for group in groups
            for trajectory in group.trajectories_G
            for step in trajectory.transitions
        ],
        "evaluated": await evaluator(client),
    }


def main(url: str, model: str, asked: Path, results: Path) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=KEY, user_metadata={"priority": "interactive"})
    if str(asked) == LONG:
        results.write_text(json.dumps(long_results(service.create_sampling_client(base_model=model).result())))
        return
    renderers.register_renderer("rollout/tiny", lambda tokenizer, _image_processor=None: ModelRenderer(tokenizer))
    found: dict[str, Any] = {
        "capabilities": [each.model_dump() for each in service.get_server_capabilities().supported_models],
        "client": client_results(service, model, json.loads(asked.read_text())),
        "cookbook": asyncio.run(cookbook_results(service.create_sampling_client(base_model=model).result(), model)),
    }
    service.close("success").result()
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
