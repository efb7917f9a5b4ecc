"""`rollout play`: plays example samples and shows what happened."""

from typing import Annotated

import typer

from rollout_client.base_url import DEFAULT_URL
from rollout_client.calls.rollouts import RolloutOptions
from rollout_client.cli.errors import errors_as_sentences
from rollout_client.cli.options import DEFAULT_RETRIES, ApiKeyFile, Retries, TimeoutS, Url, client_of, plays_rollouts
from rollout_client.cli.output import AsJson, show
from rollout_client.cli.transcript import metrics_table, transcript


@plays_rollouts
def play(
    task: Annotated[str, typer.Argument(help="A name from `rollout tasks`.")],
    options: RolloutOptions,
    count: Annotated[int, typer.Option(min=1, help="Samples to play.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the samples.")] = 0,
    url: Url = DEFAULT_URL,
    api_key_file: ApiKeyFile = None,
    timeout_s: TimeoutS = None,
    retries: Retries = DEFAULT_RETRIES,
    as_json: AsJson = False,
) -> None:
    """Play example samples of a TASK and show what happened."""
    with errors_as_sentences(), client_of(url, api_key_file, retries, timeout_s) as client:
        samples = client.example_samples(task, count, seed)
        response = client.rollout(samples, progress=True, **options)
    transcripts = [transcript(sample) for sample in response.samples]
    show(response, as_json, *transcripts, metrics_table(response.metrics))
