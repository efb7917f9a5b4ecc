"""`python -m models.smollm2`: fetches SmolLM2-135M-Instruct and makes this folder a model, unless it is one already."""

from rich.console import Console

from models.smollm2.recipe import made
from service.startup.local_service import sentences_for_the_user

if __name__ == "__main__":
    console = Console(stderr=True)
    with sentences_for_the_user(console):
        made(console)
