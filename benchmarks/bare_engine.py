"""The engine alone, in this process, with which the service is compared."""

import asyncio
import gc
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self
from unittest.mock import patch

import typer

from deployments.generation.settings import EngineSettings
from service.app import with_absolute_paths
from service.settings import ServiceSettings

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TORCH_LOGS": "-all",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""The engine's processes write to the console on which the benchmark shows its progress."""


def engine_in(config: Mapping[str, Any]) -> EngineSettings:
    """The engine settings of a Serve config, with an absolute path of the model.

    Raises:
        BadParameter: the config has a simulated engine.
    """
    engine = with_absolute_paths(ServiceSettings.model_validate(config["applications"][0]["args"]).engine)
    if engine.replica is not None:
        raise typer.BadParameter("this config has a simulated engine: there is nothing to compare with")
    return engine


class BareEngine:
    """vLLM's `AsyncLLM` with the service's engine settings, without the service.

    Its event loop runs only inside `run`, so that it takes no CPU time between measurements.
    """

    def __init__(self, llm: Any, runner: asyncio.Runner) -> None:
        self.llm = llm
        self.run = runner.run

    @classmethod
    @contextmanager
    def started(cls, settings: EngineSettings, holds_outputs: bool = False) -> Iterator[Self]:
        """`holds_outputs` as the service's engine does, with its front end's reading of them."""

        async def start() -> Any:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            from deployments.upstream.vllm.held_outputs import hold_outputs
            from deployments.upstream.vllm.token_texts import install_token_texts

            args = {**settings.engine_args(), "logprobs_mode": "processed_logprobs", "use_tqdm_on_load": False}
            config = AsyncEngineArgs(**args).create_engine_config(UsageContext.OPENAI_API_SERVER)
            if holds_outputs:
                hold_outputs(config)
            llm = AsyncLLM.from_vllm_config(config, usage_context=UsageContext.OPENAI_API_SERVER)
            if holds_outputs:
                install_token_texts(llm)
            return llm

        variables = {**settings.process_variables, **QUIET}
        with asyncio.Runner() as runner:
            with patch.dict(os.environ, variables), warnings.catch_warnings(action="ignore"):
                bare = cls(runner.run(start()), runner)
            try:
                yield bare
            finally:
                bare.llm.shutdown()
                # vLLM's client shuts down again when it is collected, which fails while the interpreter exits.
                del bare.llm
                gc.collect()

    async def play(
        self,
        prompts: Sequence[list[int]],
        turns: int,
        reply: Sequence[int],
        sampling: dict[str, Any],
        name: str,
    ) -> list[list[int]]:
        """Plays `turns` turns for each prompt, all prompts concurrently: generate, append the tokens, append `reply`.

        Returns:
            The token ids of each rollout.
        """
        return await asyncio.gather(
            *(
                self._play_one(list(prompt), turns, reply, sampling, f"{name}-{place}")
                for place, prompt in enumerate(prompts)
            )
        )

    async def _play_one(
        self, token_ids: list[int], turns: int, reply: Sequence[int], sampling: dict[str, Any], name: str
    ) -> list[int]:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            **sampling, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        for turn in range(turns):
            async for output in self.llm.generate(tokens_input(token_ids), params, request_id=f"{name}-{turn}"):
                completion = output.outputs[0]
            token_ids = [*token_ids, *completion.token_ids, *reply]
        return token_ids
