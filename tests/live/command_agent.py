"""An agent that is a program of its own: it asks the model once, and then does what its sample says. No packages."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen


def ask(messages: Any) -> None:
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"model": "any", "messages": messages}).encode()
    with urlopen(Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)) as answer:
        json.load(answer)


def main() -> None:
    sample = json.load(sys.stdin)
    does, _, argument = sample["does"].partition(" ")
    ask(sample["messages"])
    if does == "crash":
        sys.exit("The tool is broken.")
    while argument == "on":
        ask(sample["messages"])
    if does == "wait":
        Path(argument).write_text(f"{os.getpid()}\n")
        time.sleep(1000)


main()
