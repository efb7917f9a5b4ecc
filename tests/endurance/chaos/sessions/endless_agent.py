"""An agent that asks until it is killed, and writes down each answer that it got. No packages: it starts at once.

Its arguments are a folder, and the address and key of its session. Each line of its file, which is named after the
session, is one call: JSON with the ids of its prompt and its response, or null for a call that broke.
"""

import json
import random
import sys
import time
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.request import Request, urlopen

MAX_TOKENS = (8, 64, 1000)
"""The longest go on for seconds: they are what is under way when something is killed."""
TURNS = 3
AFTER_BREAK_S = 0.2


def ask(base_url: str, api_key: str, messages: list[dict[str, Any]], draw: random.Random) -> dict[str, Any]:
    """Raises `OSError` or `ValueError` if the call breaks."""
    streams = draw.random() < 0.5
    body = {
        "messages": messages,
        "max_tokens": draw.choice(MAX_TOKENS),
        "ignore_eos": True,
        "stream": streams,
        "return_token_ids": True,
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    with urlopen(Request(f"{base_url}/v1/chat/completions", json.dumps(body).encode(), headers)) as answer:
        return read_events(answer) if streams else whole(json.load(answer))


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    [choice] = answer["choices"]
    ids = {"prompt": answer["prompt_token_ids"], "response": choice["token_ids"]}
    return {**ids, "text": choice["message"]["content"]}


def read_events(answer: IO[bytes]) -> dict[str, Any]:
    prompt: list[int] = []
    response: list[int] = []
    text, is_whole = "", False
    for line in answer:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        prompt = event.get("prompt_token_ids") or prompt
        for choice in event["choices"]:
            response += choice.get("token_ids") or []
            text += choice["delta"].get("content") or ""
            is_whole |= choice["finish_reason"] in ("stop", "length")
    if not is_whole:
        raise ValueError("The stream broke off.")
    return {"prompt": prompt, "response": response, "text": text}


def main(folder: str, base_url: str, api_key: str) -> None:
    draw = random.Random(base_url)
    messages: list[dict[str, Any]] = []
    with Path(folder, base_url.rsplit("/", 1)[-1]).open("a") as file:
        for number in range(sys.maxsize):
            if len(messages) >= 2 * TURNS:
                messages = []
            asked = [*messages, {"role": "user", "content": f"What is {number} + 2?"}]
            try:
                answer = ask(base_url, api_key, asked, draw)
            except (OSError, HTTPException, ValueError, KeyError):
                file.write("null\n")
                file.flush()
                time.sleep(AFTER_BREAK_S)
                continue
            file.write(json.dumps({"prompt": answer["prompt"], "response": answer["response"]}) + "\n")
            file.flush()
            messages = [*asked, {"role": "assistant", "content": answer["text"]}]


if __name__ == "__main__":
    main(*sys.argv[1:4])
