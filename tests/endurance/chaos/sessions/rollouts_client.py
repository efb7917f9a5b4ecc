"""Has a service play rollouts of the endless agents, and writes their results to a file, one JSON line each.

Its arguments are the address of the service, the task, the number of rollouts and the file. No packages.
"""

import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen


def main(url: str, task_name: str, rollouts: str, file: str) -> None:
    sample = {"task_name": task_name, "messages": [{"role": "user", "content": "Go."}]}
    body = json.dumps({"samples": [sample] * int(rollouts), "retries": 0}).encode()
    with urlopen(Request(f"{url}/v1/rollout", body, {"content-type": "application/json"})) as answer:
        Path(file).write_text("".join(f"{json.dumps(result)}\n" for result in json.load(answer)["samples"]))


if __name__ == "__main__":
    main(*sys.argv[1:5])
