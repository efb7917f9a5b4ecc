"""`rollout tasks`, `info` and `status`: what a service is and how it is."""

import typer

from rollout_client.base_url import DEFAULT_URL
from rollout_client.cli.errors import FAILED, errors_as_sentences
from rollout_client.cli.info_table import info_table
from rollout_client.cli.options import DEFAULT_RETRIES, ApiKeyFile, Retries, Url, client_of
from rollout_client.cli.output import AsJson, out, show
from rollout_client.cli.status import status_of, status_tables
from rollout_client.cli.transcript import task_description, task_example


def tasks(
    url: Url = DEFAULT_URL, api_key_file: ApiKeyFile = None, retries: Retries = DEFAULT_RETRIES, as_json: AsJson = False
) -> None:
    """List the tasks, with a sample of each that can be posted as it is."""
    with errors_as_sentences(), client_of(url, api_key_file, retries) as client:
        found = client.tasks()
    if as_json:
        show(found, as_json)
        return
    for task in found:
        out.print(task_description(task))
        out.print(task_example(task), soft_wrap=True)


def info(
    url: Url = DEFAULT_URL, api_key_file: ApiKeyFile = None, retries: Retries = DEFAULT_RETRIES, as_json: AsJson = False
) -> None:
    """Show which model, tokenizer, limits and versions the service has."""
    with errors_as_sentences(), client_of(url, api_key_file, retries) as client:
        found = client.info()
    show(found, as_json, info_table(found))


def status(
    url: Url = DEFAULT_URL, api_key_file: ApiKeyFile = None, retries: Retries = DEFAULT_RETRIES, as_json: AsJson = False
) -> None:
    """Show whether rollouts can be played, what does not answer, and which weights are served.

    The exit code is 1 if no rollout would work.
    """
    with errors_as_sentences(), client_of(url, api_key_file, retries) as client:
        found = status_of(client)
    show(found, as_json, status_tables(found))
    if not found.is_ready:
        raise typer.Exit(FAILED)
